package sim

import (
	"math"
	"math/rand/v2"
)

// draw returns an amount of work, in nanoseconds at speed 1.
func (w Work) draw(rng *rand.Rand) float64 {
	if len(w.Mix) > 0 {
		return w.class(rng.Float64()).draw(rng)
	}
	mean := float64(w.Mean)
	switch w.Distribution {
	case Exponential:
		return mean * rng.ExpFloat64()
	case Normal:
		return max(0, mean*(1+w.Spread*rng.NormFloat64()))
	case Uniform:
		return max(0, mean*(1+w.Spread*(2*rng.Float64()-1)))
	case LogNormal:
		return mean * math.Exp(w.Spread*rng.NormFloat64()-w.Spread*w.Spread/2)
	default:
		return mean
	}
}

// class returns the part of a mixture at x, of 0 to 1.
func (w Work) class(x float64) Work {
	x *= w.shares()
	for _, c := range w.Mix {
		if x -= c.Share; x < 0 {
			return c.Work
		}
	}
	return w.Mix[len(w.Mix)-1].Work
}

func (w Work) shares() (sum float64) {
	for _, c := range w.Mix {
		sum += c.Share
	}
	return sum
}

// mean returns the mean of what draw returns, in nanoseconds.
func (w Work) mean() float64 {
	if len(w.Mix) > 0 {
		sum := 0.0
		for _, c := range w.Mix {
			sum += c.Share * c.Work.mean()
		}
		return sum / w.shares()
	}
	mean := float64(w.Mean)
	if w.Distribution == Normal && w.Spread > 0 {
		// Of max(0, X): μΦ(μ/σ) + σφ(μ/σ).
		z := 1 / w.Spread
		phi := math.Exp(-z*z/2) / math.Sqrt(2*math.Pi)
		return mean * (0.5*math.Erfc(-z/math.Sqrt2) + w.Spread*phi)
	}
	return mean
}

// zipf draws items by popularity.
type zipf struct{ upTo []float64 } // sum of the shares of the items up to each

func newZipf(items int, exponent float64) zipf {
	z := zipf{upTo: make([]float64, items)}
	sum := 0.0
	for i := range z.upTo {
		sum += math.Pow(float64(i+1), -exponent)
		z.upTo[i] = sum
	}
	return z
}

func (z zipf) draw(rng *rand.Rand) int32 {
	x := rng.Float64() * z.upTo[len(z.upTo)-1]
	low, high := 0, len(z.upTo)-1
	for low < high {
		if mid := (low + high) / 2; x < z.upTo[mid] {
			high = mid
		} else {
			low = mid + 1
		}
	}
	return int32(low)
}
