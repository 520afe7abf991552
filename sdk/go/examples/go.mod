module sawmill/examples

go 1.23

require sawmill v0.0.0

replace sawmill => ../sawmill
