module driver_go

go 1.23

require sawmill v0.0.0

replace sawmill => ../../../../sdk/go/sawmill
