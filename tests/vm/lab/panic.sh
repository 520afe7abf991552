# A guest that dies fails the script that killed it, and no other
# fails-with: the guest died

echo 1 >/proc/sys/kernel/sysrq
echo c >/proc/sysrq-trigger
sleep 60
