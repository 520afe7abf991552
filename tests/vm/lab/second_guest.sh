# After a panic the rest run in another guest (by name it comes after panic.sh)

true
