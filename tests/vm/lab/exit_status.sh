# A script that ends with an error has failed
# set: quick
# fails-with: ended with 3

exit 3
