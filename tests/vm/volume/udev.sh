# The rule for udev: /dev/sawmill/VOL is a link that udev knows, and it goes with the device
# set: quick
# seconds: 120
# needs: ublk_drv
. "$VM_TESTS/scene.sh"

udevadm control --ping
mkdir -p /run/udev/rules.d
cp "$VM_TESTS/../../packaging/udev/60-sawmill.rules" /run/udev/rules.d/
udevadm control --reload
"$BIN/sawmill" create disk --size 64M
serve disk --ublk --journal "$SCRATCH/journal" --journal-bytes 128M --cache-bytes 0
node=$(cat "$SCRATCH/serve.out")
udevadm settle
knows_link() { [[ $(udevadm info --query=symlink "$node") == *sawmill/disk* ]]; }
await 60 knows_link
# Udev makes its link again; the server made its own once.
rm /dev/sawmill/disk
udevadm trigger --action=change --settle "/sys/class/block/${node#/dev/}"
has_link() { [[ $(readlink -f /dev/sawmill/disk) == "$node" ]]; }
await 60 has_link
kill "$server"
wait "$server"
udevadm settle
[[ ! -e /dev/sawmill/disk && ! -L /dev/sawmill/disk ]] || { ls -l /dev/sawmill && exit 1; }
rm /run/udev/rules.d/60-sawmill.rules
udevadm control --reload
