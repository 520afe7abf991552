# The five examples that each language has, judged on ublk: after scene.sh,
# `. "$VM_TESTS/drivers.sh"`. It is not a test itself.
#
# shellcheck shell=bash
# The examples that VM_EXAMPLES names, else all.
examples=${VM_EXAMPLES:-null ram file mirror lazy}

# arguments EXAMPLE: puts its arguments into the array of that name, and creates its files.
arguments() {
    arguments=(24M)
    case $1 in
    file) arguments=("$SCRATCH/file" 24M) ;;
    mirror)
        truncate -s 24M "$SCRATCH/one"
        tr '\0' '\377' <"$SCRATCH/one" >"$SCRATCH/other"
        arguments=("$SCRATCH/one" "$SCRATCH/other")
        ;;
    lazy)
        head -c 24M /dev/urandom >"$SCRATCH/source"
        python3 "$VM_TESTS/../tests/drivers/driver_python/web.py" "$SCRATCH/source" \
                >"$SCRATCH/port" &
        await 60 test -s "$SCRATCH/port"
        arguments=("http://127.0.0.1:$(cat "$SCRATCH/port")/source" "$SCRATCH/copy")
        ;;
    esac
}

# Emulation is slow.
patience=(--within 180 --option request_timeout_s=120)

# judge WORD...: `sawmill conform` of each example behind ublk; % in the words stands for its name.
# All are judged, even after a failure.
judge() {
    local example from failed=0 kind
    for example in $examples; do
        from=$SECONDS kind=full
        [[ $example == null ]] && kind=null
        arguments "$example"
        echo "== $example"
        # shellcheck disable=SC2086 # several words, or none
        "$BIN/sawmill" conform --door ublk --kind "$kind" "${patience[@]}" ${VM_CONFORM:-} -- \
            "${@//%/$example}" "${arguments[@]}" || failed=1
        echo "== $example took $((SECONDS - from)) s"
        rm -f "$SCRATCH"/{file,one,other,source,copy,copy.map}
    done
    return "$failed"
}
