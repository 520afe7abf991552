// Sizes as people write them, in units of 1024. Not here: durations, which are Go's own.

package sawmill

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// ParseSize parses a size in bytes: 64M is 64 times 1024 times 1024. Units are K, M, G and T.
func ParseSize(text string) (int64, error) {
	number, shift := text, 0
	if unit := strings.IndexAny("KMGT", text[max(len(text)-1, 0):]); text != "" && unit >= 0 {
		number, shift = text[:len(text)-1], 10*(unit+1)
	}
	size, err := strconv.ParseInt(number, 10, 64)
	if err != nil || size <= 0 || size > math.MaxInt64>>shift {
		return 0, fmt.Errorf("%q is not a size: write it as 67108864 or 64M", text)
	}
	return size << shift, nil
}
