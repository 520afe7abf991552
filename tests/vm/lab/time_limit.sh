# A script that does not end is ended, with all that it started
# set: quick
# seconds: 2
# fails-with: still running after 2 s

setsid sleep infinity &
sleep infinity
