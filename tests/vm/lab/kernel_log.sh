# What the kernel says about a fault fails a script that did not notice
# set: quick
# fails-with: kernel: WARNING: of the lab itself

echo "WARNING: of the lab itself" >/dev/kmsg
