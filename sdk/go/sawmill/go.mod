module sawmill

go 1.23
