module github.com/asch/buse/lib/go/buse

go 1.16
