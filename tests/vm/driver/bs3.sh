# the original BS3 on ublk: a file system on MinIO, found again by the next one
# set: full
# seconds: 900
# needs: ublk_drv
# drivers: bs3
. "$VM_TESTS/scene.sh"

export SAWMILL=$BIN/sawmill XDG_STATE_HOME=$SCRATCH/state
export MINIO_ROOT_USER=sawmill MINIO_ROOT_PASSWORD=sawmill-secret
at=$SCRATCH/mounted
mkdir "$at" "$SCRATCH/minio"
"$VM_TESTS/../../.prepared/bin/minio" server --quiet --address 127.0.0.1:9000 "$SCRATCH/minio" &
minio_is_up() {
    curl --silent --fail --output "$SCRATCH/health" http://127.0.0.1:9000/minio/health/live
}
await 300 minio_is_up

cat >"$SCRATCH/config.toml" <<CONFIG
size = 1
[s3]
access_key = "$MINIO_ROOT_USER"
secret_key = "$MINIO_ROOT_PASSWORD"
bucket = "bs3"
remote = "http://127.0.0.1:9000"
uploaders = 4
downloaders = 4
[write]
durable = true
[log]
level = 2
CONFIG

serves_or_dead() { [[ $(blockdev --getsize64 /dev/ublkb0) == 1073741824 ]] || ! kill -0 "$bs3"; }
start_bs3() {
    "$BIN/drivers/bs3/bs3" -c "$SCRATCH/config.toml" &
    bs3=$!
    await 120 serves_or_dead
    kill -0 "$bs3"
}
is_gone() { [[ ! -e /dev/ublkb0 ]]; }
stop_bs3() {
    kill -TERM "$bs3"
    wait "$bs3"
    await 60 is_gone
}

start_bs3
echo "BS3 serves after $SECONDS s"
# BS3 forgets the content of its first object (sdk/go/buse/README.md), so that gets unneeded data.
dd if=/dev/urandom of=/dev/ublkb0 bs=4096 seek=262143 count=1 oflag=direct conv=fsync status=none
mkfs.ext4 -q -F -E nodiscard /dev/ublkb0 900M
mount /dev/ublkb0 "$at"
for i in $(seq 12); do
    head -c 2M /dev/urandom >"$at/file-$i"
done
(cd "$at" && sha256sum file-*) >"$SCRATCH/sums"
umount "$at"
echo "written after $SECONDS s"
stop_bs3
start_bs3
e2fsck -f -n /dev/ublkb0
mount /dev/ublkb0 "$at"
(cd "$at" && sha256sum --quiet --check "$SCRATCH/sums")
echo more >"$at/more"
umount "$at"
stop_bs3
echo "found again, after $SECONDS s"
