package sim

// pool hands out structs that are used again and again. Each has a number, by which events refer to it.
type pool[T any] struct {
	items []*T
	free  []int32
}

const poolChunk = 256

func (p *pool[T]) take() (int32, *T) {
	if len(p.free) == 0 {
		p.grow()
	}
	id := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	return id, p.items[id]
}

func (p *pool[T]) grow() {
	chunk := make([]T, poolChunk)
	for i := range chunk {
		p.free = append(p.free, int32(len(p.items)))
		p.items = append(p.items, &chunk[i])
	}
}

func (p *pool[T]) release(id int32) { p.free = append(p.free, id) }
