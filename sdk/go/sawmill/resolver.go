// Which of two writes in chunks is newer. Invariant: bytes of an older write never replace those of
// a newer one, in whatever order chunks are applied; what nothing older can come for is forgotten.
// Not here: the bytes of a chunk (chunk.go).

package sawmill

import "sync"

// Resolver applies the entries of chunks so that every byte ends with what was written last, in
// whatever order chunks arrive: late writes are ignored (docs/format/write_chunk.md).
//
// Two writes of one collision area are never applied at the same time. Applied writes are
// remembered as long as an older one may arrive.
type Resolver struct {
	areaBytes int64
	mu        sync.Mutex // protects the fields below; an area has a lock of its own
	areas     map[int64]*area
	floor     uint64
	chunks    []appliedChunk
}

// area holds the remembered writes of a collision area.
type area struct {
	mu      sync.Mutex
	users   int // protected by Resolver.mu: the goroutines that use this area
	applied []appliedWrite
}

type appliedWrite struct {
	start, end           int64
	writeNumber, horizon uint64
}

// appliedChunk is a chunk that was applied, with the areas that remember it.
type appliedChunk struct {
	horizon uint64
	areas   []int64
}

// NewResolver makes a resolver for chunks of a device with this collision_area_size.
func NewResolver(areaBytes int64) *Resolver {
	return &Resolver{areaBytes: areaBytes, areas: make(map[int64]*area)}
}

// Apply calls write for the bytes of a chunk that nothing newer has written. If write fails, its
// entry counts as not applied, and the rest of the chunk is skipped.
func (r *Resolver) Apply(chunk Chunk, write func(p []byte, off int64) error) error {
	r.forget(chunk.Floor)
	done := appliedChunk{horizon: chunk.Horizon}
	defer func() { r.remember(done) }()
	for entry, data := range chunk.Entries() {
		number := entry.Address / r.areaBytes
		done.areas = append(done.areas, number)
		if err := r.apply(number, entry, data, chunk.Horizon, write); err != nil {
			return err
		}
	}
	return nil
}

func (r *Resolver) apply(number int64, entry ChunkEntry, data []byte, horizon uint64,
	write func(p []byte, off int64) error) error {
	area := r.take(number)
	defer r.put(number, area)
	area.mu.Lock()
	defer area.mu.Unlock()
	free := []span{{entry.Address, entry.Address + entry.Length}}
	for _, other := range area.applied {
		if other.writeNumber > entry.WriteNumber {
			free = without(free, span{other.start, other.end})
		}
	}
	for _, part := range free {
		bytes := data[part.start-entry.Address : part.end-entry.Address]
		if err := write(bytes, part.start); err != nil {
			return err
		}
	}
	end := entry.Address + entry.Length
	area.applied = append(area.applied,
		appliedWrite{entry.Address, end, entry.WriteNumber, horizon})
	return nil
}

func (r *Resolver) take(number int64) *area {
	r.mu.Lock()
	defer r.mu.Unlock()
	found := r.areas[number]
	if found == nil {
		found = new(area)
		r.areas[number] = found
	}
	found.users++
	return found
}

func (r *Resolver) put(number int64, area *area) {
	r.mu.Lock()
	defer r.mu.Unlock()
	area.users--
	if area.users == 0 && len(area.applied) == 0 {
		delete(r.areas, number)
	}
}

func (r *Resolver) remember(chunk appliedChunk) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.chunks = append(r.chunks, chunk)
}

// forget drops writes for which nothing older can arrive: all chunks below the floor are answered.
func (r *Resolver) forget(floor uint64) {
	r.mu.Lock()
	if floor <= r.floor {
		r.mu.Unlock()
		return
	}
	r.floor = floor
	var old []int64
	kept := r.chunks[:0]
	for _, chunk := range r.chunks {
		if chunk.horizon < floor {
			old = append(old, chunk.areas...)
		} else {
			kept = append(kept, chunk)
		}
	}
	clear(r.chunks[len(kept):])
	r.chunks = kept
	r.mu.Unlock()
	for _, number := range old {
		area := r.take(number)
		area.mu.Lock()
		left := area.applied[:0]
		for _, other := range area.applied {
			if other.horizon >= floor {
				left = append(left, other)
			}
		}
		area.applied = left
		area.mu.Unlock()
		r.put(number, area)
	}
}

// span is a range of bytes.
type span struct{ start, end int64 }

// without removes a range from others.
func without(spans []span, cut span) []span {
	var left []span
	for _, one := range spans {
		if before := (span{one.start, min(one.end, cut.start)}); before.start < before.end {
			left = append(left, before)
		}
		if after := (span{max(one.start, cut.end), one.end}); after.start < after.end {
			left = append(left, after)
		}
	}
	return left
}
