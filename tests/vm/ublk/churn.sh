# ublk devices come and go: added, used, crashed, taken over or swept away
# set: quick
# seconds: 200 2400
# needs: ublk_drv
. "$VM_TESTS/ublk/parts/server.sh"

rounds=$(quick_or_full 8 200)
for round in $(seq "$rounds"); do
    start_server churn --size 16 --queues $((round % 2 + 1)) --depth 8 --devices $((round % 3 + 1))
    for node in $NODES; do
        dd if=/dev/zero of="$node" bs=4k count=1 oflag=direct status=none ||
            fail "round $round: no write to $node"
    done
    case $((round % 4)) in
    0)
        crash_server
        wait_for 40 sh -c "$SERVER sweep >swept" || fail "round $round: nothing can be swept away"
        ;;
    1)
        count=$(echo "$NODES" | wc -w)
        id=${NODES%% *}
        crash_server
        start_server churn --size 16 --devices "$count" --recover "${id#/dev/ublkb}"
        stop_server
        ;;
    *) stop_server ;;
    esac
    ! ls /dev/ublkb* 2>/dev/null || fail "round $round: a device is left"
done
[ -z "$("$SERVER" list)" ] || fail "the kernel still knows devices"
echo "$rounds rounds"
