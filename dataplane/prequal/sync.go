package prequal

import (
	"math/rand/v2"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/policy"
)

// Sync is the synchronous mode of Prequal (§4): the answers to the probes of one request place that request, by the same
// rule, ties included. There is no pool; what lasts is the history of RIF, by which the next answers are hot or cold.
type Sync[K comparable] struct {
	pool Pool[K] // of the answers to one request
}

// NewSync returns a Sync without history. Of the configuration only Q_RIF counts. The RIF divided by the weight is what
// the rule goes by.
func NewSync[K comparable](cfg policy.Prequal, rng *rand.Rand, weight func(K) int32) *Sync[K] {
	return &Sync[K]{pool: Pool[K]{cfg: cfg, rng: rng, weight: weight}}
}

// Consider takes in an answer to a probe of the request to place. One replica's may count more than once.
func (s *Sync[K]) Consider(key K, r load.Report) {
	s.pool.entries = append(s.pool.entries, s.pool.entry(time.Time{}, key, r))
}

// Choose places the request by the answers considered, of which there must be one, and forgets them but for their RIF.
func (s *Sync[K]) Choose() (K, Class) {
	best, class := s.pool.best()
	key := s.pool.entries[best].key
	for i := range s.pool.entries {
		s.pool.history.add(s.pool.entries[i].share())
	}
	s.pool.entries = s.pool.entries[:0]
	return key, class
}

// Threshold returns θ, as that of a Pool.
func (s *Sync[K]) Threshold() (float64, bool) { return s.pool.Threshold() }
