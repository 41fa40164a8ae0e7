package capture

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// version is that of the rules. It is in the comment of each, by which they are known.
const version = 1

// The registers that expressions use: a value of up to 16 bytes, and where a second one follows one of 4 or 16 bytes.
const (
	register        = unix.NFT_REG_1
	registerAfter4  = unix.NFT_REG32_01
	registerAfter16 = unix.NFT_REG_2
)

// captureTables direct connections, those of an agent and of its successor. Each agent owns one. At the same priority the
// kernel asks the chain first that was made last, so the successor decides.
func captureTables() []*nftables.Table {
	return []*nftables.Table{table("headroom"), table("headroom-2")}
}

func table(name string) *nftables.Table {
	return &nftables.Table{Name: name, Family: nftables.TableFamilyINet}
}

// guardTable refuses what goes to virtual addresses all the same. It outlives the agent.
func guardTable() *nftables.Table {
	return table("headroom-guard")
}

// rule is what a rule does, in words, and how.
type rule struct {
	what  string
	exprs []expr.Any
}

// comment is what a rule is known by.
func comment(what string) []byte {
	return userdata.AppendString(nil, userdata.TypeComment, fmt.Sprintf("headroom v%d: %s", version, what))
}

// readComment returns what a rule does, and the version; zero: it is not of this package.
func readComment(r *nftables.Rule) (what string, version int) {
	s, _ := userdata.GetString(r.UserData, userdata.TypeComment)
	prefix := "headroom v"
	if n, err := fmt.Sscanf(s, prefix+"%d:", &version); n != 1 || err != nil {
		return "", 0
	}
	return s[min(len(s), len(fmt.Sprintf("%s%d: ", prefix, version))):], version
}

// Sets.

func uidSet(of *nftables.Table) *nftables.Set {
	return &nftables.Set{Table: of, Name: "exempt_uids", KeyType: nftables.TypeUID, KeyByteOrder: binaryutil.NativeEndian}
}

func portSet(of *nftables.Table) *nftables.Set {
	return &nftables.Set{Table: of, Name: "exempt_ports", KeyType: nftables.TypeInetService, KeyByteOrder: binaryutil.BigEndian}
}

// realSet is that of the real addresses of a kind.
func realSet(of *nftables.Table, four bool) *nftables.Set {
	name, address := "real6", nftables.TypeIP6Addr
	if four {
		name, address = "real4", nftables.TypeIPAddr
	}
	key := nftables.MustConcatSetType(address, nftables.TypeInetService)
	return &nftables.Set{Table: of, Name: name, KeyType: key, KeyByteOrder: binaryutil.BigEndian}
}

// elements returns the real addresses of a kind as keys of its set.
func elements(addrs []netip.AddrPort, four bool) []nftables.SetElement {
	var all []nftables.SetElement
	for _, a := range addrs {
		if a.Addr().Is4() == four {
			key := binary.BigEndian.AppendUint16(a.Addr().AsSlice(), a.Port())
			all = append(all, nftables.SetElement{Key: append(key, 0, 0)})
		}
	}
	return all
}

func (c Config) uids() []nftables.SetElement {
	var all []nftables.SetElement
	for _, uid := range unique(c.ExemptUIDs) {
		all = append(all, nftables.SetElement{Key: binaryutil.NativeEndian.PutUint32(uid)})
	}
	return all
}

func (c Config) ports() []nftables.SetElement {
	var all []nftables.SetElement
	for _, port := range unique(c.ExemptPorts) {
		all = append(all, nftables.SetElement{Key: binaryutil.BigEndian.PutUint16(port)})
	}
	return all
}

func unique[T uint16 | uint32](numbers []T) []T {
	return slices.Compact(slices.Sorted(slices.Values(numbers)))
}

// Expressions.

func all(parts ...[]expr.Any) []expr.Any { return slices.Concat(parts...) }

// is matches packets about which the kernel knows a fact.
func is(key expr.MetaKey, value ...byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: register}, equal(value)}
}

func equal(value []byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: value}
}

func tcp() []expr.Any { return is(expr.MetaKeyL4PROTO, unix.IPPROTO_TCP) }

// opening matches the first packet of a TCP connection: the kernel may also take one for new that it has not tracked so far.
func opening() []expr.Any {
	const offset, syn, finSynRstAck = 13, 0x02, 0x17
	return all(tcp(), []expr.Any{
		&expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 1},
		&expr.Bitwise{SourceRegister: register, DestRegister: register, Len: 1, Mask: []byte{finSynRstAck}, Xor: []byte{0}},
		equal([]byte{syn}),
	})
}

// in matches what is in a set.
func in(s *nftables.Set) expr.Any {
	return &expr.Lookup{SourceRegister: register, SetName: s.Name, SetID: s.ID}
}

func toPort(register uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
}

func onPort(port uint16) []expr.Any {
	return []expr.Any{toPort(register), equal(binaryutil.BigEndian.PutUint16(port))}
}

// toAddress loads the destination of a packet of a kind.
func toAddress(four bool) []expr.Any {
	family, offset, length := byte(unix.NFPROTO_IPV6), uint32(24), uint32(net.IPv6len)
	if four {
		family, offset, length = unix.NFPROTO_IPV4, 16, net.IPv4len
	}
	load := &expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length}
	return all(is(expr.MetaKeyNFPROTO, family), []expr.Any{load})
}

// toRange matches packets to a range of addresses.
func toRange(p netip.Prefix) []expr.Any {
	address := p.Addr().AsSlice()
	mask := &expr.Bitwise{
		SourceRegister: register,
		DestRegister:   register,
		Len:            uint32(len(address)),
		Mask:           net.CIDRMask(p.Bits(), 8*len(address)),
		Xor:            make([]byte, len(address)),
	}
	return all(toAddress(p.Addr().Is4()), []expr.Any{mask, equal(address)})
}

// toReal matches packets to real addresses and their ports.
func toReal(s *nftables.Set, four bool) []expr.Any {
	after := uint32(registerAfter16)
	if four {
		after = registerAfter4
	}
	return all(toAddress(four), []expr.Any{toPort(after), in(s)})
}

// ofCgroup matches packets of sockets of a control group, and of groups in it.
func ofCgroup(g cgroup) []expr.Any {
	load := &expr.Socket{Key: expr.SocketKeyCgroupv2, Level: g.level, Register: register}
	return []expr.Any{load, equal(binaryutil.NativeEndian.PutUint64(g.id))}
}

func leave() []expr.Any {
	return []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictReturn}}
}

func redirect(port uint16) []expr.Any {
	return []expr.Any{
		&expr.Counter{},
		&expr.Immediate{Register: register, Data: binaryutil.BigEndian.PutUint16(port)},
		&expr.Redir{RegisterProtoMin: register},
	}
}

// deliver directs what comes from elsewhere to an address that the route to the virtual range makes this node's own. Unlike
// a redirect, that works whatever addresses the interface has by which it comes.
func deliver(to netip.AddrPort) []expr.Any {
	family, after := uint32(unix.NFPROTO_IPV6), uint32(registerAfter16)
	if to.Addr().Is4() {
		family, after = unix.NFPROTO_IPV4, registerAfter4
	}
	return []expr.Any{
		&expr.Counter{},
		&expr.Immediate{Register: register, Data: to.Addr().AsSlice()},
		&expr.Immediate{Register: after, Data: binaryutil.BigEndian.PutUint16(to.Port())},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: family, RegAddrMin: register, RegProtoMin: after},
	}
}

func reset() []expr.Any {
	return []expr.Any{&expr.Counter{}, &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}
}

func unreachable() []expr.Any {
	reject := &expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}
	return []expr.Any{&expr.Counter{}, reject}
}

// Rules.

// sets are those that rules look things up in.
type sets struct{ uids, ports, real4, real6 *nftables.Set }

// fromHere returns the rules for what this network namespace sends, to be captured at a port.
func (c Config) fromHere(s sets, port uint16, four bool, cgroups []cgroup) []rule {
	if four {
		c.IPv6 = netip.Prefix{}
	}
	whose := []expr.Any{&expr.Meta{Key: expr.MetaKeySKUID, Register: register}, in(s.uids)}
	rules := []rule{c.leaveMark(), {"leave exempt users", all(whose, leave())}}
	for _, g := range cgroups {
		rules = append(rules, rule{"leave control group " + abridged(g.path), all(ofCgroup(g), leave())})
	}
	rules = append(rules, leavePorts(s))
	for _, r := range c.ranges() {
		rules = append(rules, rule{"redirect virtual " + kind(r), all(tcp(), toRange(r), redirect(port))})
	}
	rules = append(rules, c.leaveItself()...)
	rules = append(rules, rule{"redirect real IPv4", all(opening(), toReal(s.real4, true), redirect(port))})
	if !four {
		rules = append(rules, rule{"redirect real IPv6", all(opening(), toReal(s.real6, false), redirect(port))})
	}
	if c.RedirectDNS {
		rules = append(rules, c.redirectDNS()...)
	}
	return rules
}

// fromElsewhere returns those for what comes from others. Whose that is the kernel doesn't know.
func (c Config) fromElsewhere(s sets) []rule {
	rules := []rule{c.leaveMark(), leavePorts(s)}
	for _, r := range c.ranges() {
		rules = append(rules, rule{"redirect virtual " + kind(r), all(tcp(), toRange(r), deliver(c.at(r)))})
	}
	rules = append(rules, c.leaveItself()...)
	for _, r := range c.ranges() {
		set, four := s.real6, r.Addr().Is4()
		if four {
			set = s.real4
		}
		rules = append(rules, rule{"redirect real " + kind(r), all(opening(), toReal(set, four), deliver(c.at(r)))})
	}
	if c.RedirectPodDNS {
		rules = append(rules, c.redirectDNS()...)
	}
	return rules
}

func (c Config) leaveMark() rule {
	return rule{"leave the agent's connections", all(is(expr.MetaKeyMARK, binaryutil.NativeEndian.PutUint32(c.Mark)...), leave())}
}

func leavePorts(s sets) rule {
	return rule{"leave exempt ports", all(tcp(), []expr.Any{toPort(register), in(s.ports)}, leave())}
}

// leaveItself is there as a real address may be the agent's own, or its successor's.
func (c Config) leaveItself() (rules []rule) {
	for _, port := range c.listenable() {
		rules = append(rules, rule{"leave the port of captured connections", all(tcp(), onPort(port), leave())})
	}
	return rules
}

func (c Config) redirectDNS() []rule {
	return []rule{
		{"redirect DNS over UDP", all(is(expr.MetaKeyL4PROTO, unix.IPPROTO_UDP), onPort(53), redirect(c.DNSPort))},
		{"redirect DNS over TCP", all(opening(), onPort(53), redirect(c.DNSPort))},
	}
}

// abridged keeps a comment as short as it must be.
func abridged(path string) string {
	if len(path) > 80 {
		return "…" + path[len(path)-77:]
	}
	return path
}

// delivered returns the rules for what comes from elsewhere and was captured: where it goes now is in a virtual range, too.
func (c Config) delivered() []rule {
	var rules []rule
	for _, r := range c.ranges() {
		at := netip.PrefixFrom(r.Addr(), r.Addr().BitLen())
		rules = append(rules, rule{"leave captured " + kind(r), all(tcp(), onPort(c.Port), toRange(at), leave())})
	}
	return rules
}

// refusals returns the rules of each chain of the guard table.
func (c Config) refusals() []rule {
	var rules []rule
	for _, r := range c.ranges() {
		rules = append(rules,
			rule{"refuse TCP to virtual " + kind(r), all(tcp(), toRange(r), reset())},
			rule{"refuse all else to virtual " + kind(r), all(toRange(r), unreachable())})
	}
	return rules
}

// trackConnections does nothing, in a chain of the guard that does nothing. But the kernel translates the addresses of
// connections only while there is a NAT chain, and a rule that takes connection tracking. Without them applications would not
// see captured connections end when the agent dies: what tells them would not come from the address that they know.
func trackConnections() rule {
	const original = 0
	direction := &expr.Ct{Key: expr.CtKeyDIRECTION, Register: register}
	return rule{"keep translating captured connections", all([]expr.Any{direction, equal([]byte{original})}, leave())}
}

func kind(r netip.Prefix) string {
	if r.Addr().Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// fill puts sets, chains and rules into the capture table, which must be empty, when flushed.
func (k *kernel) fill(c Config, port uint16, four bool, cgroups []cgroup, addrs []netip.AddrPort) error {
	s := sets{uidSet(k.table), portSet(k.table), realSet(k.table, true), realSet(k.table, false)}
	for set, content := range map[*nftables.Set][]nftables.SetElement{s.uids: c.uids(), s.ports: c.ports(), s.real4: nil, s.real6: nil} {
		if err := k.AddSet(set, content); err != nil {
			return fmt.Errorf("make nftables set %s: %w", set.Name, err)
		}
	}
	if err := k.change(nil, addrs); err != nil {
		return err
	}
	t := k.table
	k.chain(t, "output", nftables.ChainTypeNAT, nftables.ChainHookOutput, c.fromHere(s, port, four, cgroups))
	if c.Pod {
		return nil
	}
	k.chain(t, "prerouting", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, c.fromElsewhere(s))
	return nil
}

// guard puts the guard table in place of what was left of one, when flushed.
func (k *kernel) guard(c Config) {
	t := guardTable()
	k.removeGuard()
	k.AddTable(t)
	for _, chain := range c.guardChains() {
		k.chain(t, chain.name, chain.kind, chain.hook, chain.rules)
	}
}

type chain struct {
	name  string
	kind  nftables.ChainType
	hook  *nftables.ChainHook
	rules []rule
}

// guardChains returns those of the guard table.
func (c Config) guardChains() []chain {
	chains := []chain{
		{"output", nftables.ChainTypeFilter, nftables.ChainHookOutput, c.refusals()},
		{"translate", nftables.ChainTypeNAT, nftables.ChainHookOutput, []rule{trackConnections()}},
	}
	if c.Pod {
		return chains
	}
	return append(chains,
		chain{"input", nftables.ChainTypeFilter, nftables.ChainHookInput, append(c.delivered(), c.refusals()...)},
		chain{"forward", nftables.ChainTypeFilter, nftables.ChainHookForward, c.refusals()})
}

// removeGuard removes the guard table when flushed, whether or not there is one.
func (k *kernel) removeGuard() {
	k.AddTable(guardTable())
	k.DelTable(guardTable())
}

func (k *kernel) chain(t *nftables.Table, name string, of nftables.ChainType, hook *nftables.ChainHook, rules []rule) {
	priority := nftables.ChainPriorityFilter
	if of == nftables.ChainTypeNAT {
		priority = firstOfNAT()
	}
	accept := nftables.ChainPolicyAccept
	c := k.AddChain(&nftables.Chain{Name: name, Table: t, Type: of, Hooknum: hook, Priority: priority, Policy: &accept})
	for _, r := range rules {
		k.AddRule(&nftables.Rule{Table: t, Chain: c, Exprs: r.exprs, UserData: comment(r.what)})
	}
}

// firstOfNAT comes just before where others have their NAT: at the same priority the newest would come first, whoever it is.
func firstOfNAT() *nftables.ChainPriority {
	return new(*nftables.ChainPriorityNATDest - 1)
}

// change takes addresses out of the sets of real ones, and puts others in, when flushed.
func (k *kernel) change(gone, come []netip.AddrPort) error {
	for _, four := range []bool{true, false} {
		for part := range slices.Chunk(elements(gone, four), elementsPerMessage) {
			if err := k.SetDeleteElements(realSet(k.table, four), part); err != nil {
				return fmt.Errorf("remove real addresses: %w", err)
			}
		}
		for part := range slices.Chunk(elements(come, four), elementsPerMessage) {
			if err := k.SetAddElements(realSet(k.table, four), part); err != nil {
				return fmt.Errorf("add real addresses: %w", err)
			}
		}
	}
	return nil
}

// elementsPerMessage keeps messages below 64 KiB.
const elementsPerMessage = 1000
