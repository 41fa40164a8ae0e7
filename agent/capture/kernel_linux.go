package capture

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const (
	// tableOwner is NFT_TABLE_F_OWNER: the kernel removes the table when the socket that made it is closed, as it is when
	// its process dies. Nobody else may change it meanwhile.
	tableOwner = 2
	// ownerAttribute is NFTA_TABLE_OWNER, the netlink port of that socket.
	ownerAttribute = 7
	// handleAttribute is NFTA_TABLE_HANDLE.
	handleAttribute = 4

	newTable      = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE
	getTable      = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETTABLE
	delTable      = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELTABLE
	getGeneration = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN
	acked         = netlink.Request | netlink.Acknowledge
	socketBuffer  = 16 << 20         // a batch is one message to the kernel
	patience      = 10 * time.Second // with a kernel that doesn't answer
)

var (
	errNoAdmin = errors.New("capture needs CAP_NET_ADMIN: run the agent as root or give it the capability; " +
		"its proxy port works without")
	errNoEntry  = errors.New("capture in another network namespace needs CAP_SYS_ADMIN: run the agent as root or give it the capability")
	errNoTables = errors.New("capture needs nftables in the kernel (the module nf_tables, with CONFIG_NF_TABLES_INET): " +
		"load it; the proxy port works without")
	errNoOwner = errors.New("capture needs nftables tables with an owner, which came with Linux 5.12: use a newer kernel; " +
		"the proxy port works without")
	errBusy = errors.New("another agent captures in this network namespace")
)

// kernel is a netlink socket to nftables. Tables that it owns live as long as it.
type kernel struct {
	*nftables.Conn
	socket *netlink.Conn
	table  *nftables.Table // the capture table of this agent, or of the one that is looked at
}

func dialKernel(ns namespace) (*kernel, error) {
	var k kernel
	keep := func(s *netlink.Conn) error {
		k.socket = s
		return enlarge(s)
	}
	var err error
	k.Conn, err = nftables.New(nftables.AsLasting(), nftables.WithNetNSFd(ns.fd()), nftables.WithSockOptions(keep))
	switch {
	case errors.Is(err, unix.EPROTONOSUPPORT):
		return nil, fmt.Errorf("%w (%w)", errNoTables, err)
	case errors.Is(err, unix.EPERM) && ns.File != nil:
		return nil, fmt.Errorf("%w (%w)", errNoEntry, err)
	case err != nil:
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	return &k, nil
}

// enlarge lets a socket send batches of any size, and take the answers, if it may; else as large as the system allows.
func enlarge(s *netlink.Conn) error {
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(func(fd uintptr) {
		for _, option := range []int{unix.SO_SNDBUF, unix.SO_RCVBUF, unix.SO_SNDBUFFORCE, unix.SO_RCVBUFFORCE} {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, option, socketBuffer)
		}
	})
}

func (k *kernel) close() { _ = k.CloseLasting() }

// hurry bounds how long what follows may take.
func (k *kernel) hurry() (done func()) {
	_ = k.socket.SetDeadline(time.Now().Add(patience))
	return func() { _ = k.socket.SetDeadline(time.Time{}) }
}

// flush sends what was gathered. The kernel does all of it, or nothing.
func (k *kernel) flush() error {
	defer k.hurry()()
	err := k.Flush()
	if err != nil {
		k.drain()
	}
	return err
}

// drain reads the answers that are left after an error, lest they be taken for those to what is sent next.
func (k *kernel) drain() {
	_ = k.socket.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	for {
		if _, err := k.socket.Receive(); errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, os.ErrClosed) {
			return
		}
	}
}

// own makes a table that lives as long as the socket, in place of what was left of unowned ones.
func (k *kernel) own(name string, unowned []string) error {
	var changes []netlink.Message
	for _, left := range unowned {
		changes = append(changes, tableMessage(delTable, acked, left))
	}
	flags := netlink.Attribute{Type: unix.NFTA_TABLE_FLAGS, Data: binary.BigEndian.AppendUint32(nil, tableOwner)}
	err := k.send(nil, append(changes, tableMessage(newTable, acked|netlink.Create, name, flags))...)
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%w (%w)", errBusy, err)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("%w (%w)", errNoOwner, err)
	case err != nil:
		return fmt.Errorf("make nftables table %s: %w", name, err)
	}
	return nil
}

// send sends changes. The kernel makes all of them, or none: these only if nothing has changed since a generation of rules,
// unless that is nil.
func (k *kernel) send(since []byte, changes ...netlink.Message) error {
	defer k.hurry()()
	var only []byte
	if since != nil {
		only = marshal(netlink.Attribute{Type: unix.NFNL_BATCH_GENID, Data: since})
	}
	batch := []netlink.Message{message(unix.NFNL_MSG_BATCH_BEGIN, netlink.Request, 0, unix.NFNL_SUBSYS_NFTABLES, only...)}
	batch = append(batch, changes...)
	batch = append(batch, message(unix.NFNL_MSG_BATCH_END, netlink.Request, 0, unix.NFNL_SUBSYS_NFTABLES))
	_, err := k.socket.SendMessages(batch)
	for range changes { // they are acknowledged, the first and the last message are not
		if err == nil {
			_, err = k.socket.Receive()
		}
	}
	if err != nil {
		k.drain()
	}
	return err
}

// generation returns by what the kernel knows that rules have changed.
func (k *kernel) generation() ([]byte, error) {
	defer k.hurry()()
	replies, err := k.socket.Execute(message(getGeneration, netlink.Request, unix.AF_UNSPEC, 0))
	if err != nil || len(replies) == 0 {
		return nil, fmt.Errorf("read the generation of nftables rules: %w", err)
	}
	d, err := attributes(replies[0].Data)
	if err != nil {
		return nil, err
	}
	var id []byte
	for d.Next() {
		if d.Type() == unix.NFTA_GEN_ID {
			id = d.Bytes()
		}
	}
	return id, d.Err()
}

func message(kind netlink.HeaderType, flags netlink.HeaderFlags, family byte, resource uint16, data ...byte) netlink.Message {
	header := binary.BigEndian.AppendUint16([]byte{family, unix.NFNETLINK_V0}, resource)
	return netlink.Message{Header: netlink.Header{Type: kind, Flags: flags}, Data: append(header, data...)}
}

func tableMessage(kind netlink.HeaderType, flags netlink.HeaderFlags, name string, more ...netlink.Attribute) netlink.Message {
	all := append([]netlink.Attribute{{Type: unix.NFTA_TABLE_NAME, Data: append([]byte(name), 0)}}, more...)
	return message(kind, flags, unix.NFPROTO_INET, 0, marshal(all...)...)
}

func marshal(all ...netlink.Attribute) []byte {
	data, err := netlink.MarshalAttributes(all)
	if err != nil {
		panic(err) // they are too long, though they are short
	}
	return data
}

// owned is a table of family inet, and the netlink port of its owner; zero: it has none. Tables that were made later have a
// larger handle.
type owned struct {
	name   string
	owner  uint32
	handle uint64
}

// tables lists those of family inet. It is the first thing to do, as it tells what this process may do, and the kernel can.
func (k *kernel) tables() ([]owned, error) {
	defer k.hurry()()
	replies, err := k.socket.Execute(message(getTable, netlink.Request|netlink.Dump, unix.NFPROTO_INET, 0))
	switch {
	case errors.Is(err, unix.EPERM):
		return nil, fmt.Errorf("%w (%w)", errNoAdmin, err)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return nil, fmt.Errorf("%w (%w)", errNoTables, err)
	case err != nil:
		return nil, fmt.Errorf("list nftables tables: %w", err)
	}
	var tables []owned
	for _, m := range replies {
		t, err := decodeTable(m.Data)
		if err != nil {
			return nil, fmt.Errorf("list nftables tables: %w", err)
		}
		tables = append(tables, t)
	}
	return tables, nil
}

func decodeTable(b []byte) (owned, error) {
	d, err := attributes(b)
	if err != nil {
		return owned{}, err
	}
	var t owned
	for d.Next() {
		switch d.Type() {
		case unix.NFTA_TABLE_NAME:
			t.name = d.String()
		case ownerAttribute:
			t.owner = d.Uint32()
		case handleAttribute:
			t.handle = d.Uint64()
		}
	}
	return t, d.Err()
}

// attributes returns those of a message.
func attributes(b []byte) (*netlink.AttributeDecoder, error) {
	if len(b) < 4 {
		return nil, errors.New("a message that is too short")
	}
	d, err := netlink.NewAttributeDecoder(b[4:])
	if err == nil {
		d.ByteOrder = binary.BigEndian
	}
	return d, err
}

// chains lists those of a table.
func (k *kernel) chains(of *nftables.Table) ([]*nftables.Chain, error) {
	defer k.hurry()()
	all, err := k.ListChains()
	if err != nil {
		return nil, fmt.Errorf("list nftables chains: %w", err)
	}
	return slices.DeleteFunc(all, func(c *nftables.Chain) bool {
		return c.Table.Name != of.Name || c.Table.Family != of.Family
	}), nil
}

// rules lists those of a chain.
func (k *kernel) rules(c *nftables.Chain) ([]*nftables.Rule, error) {
	defer k.hurry()()
	rules, err := k.GetRules(c.Table, c)
	if err != nil {
		return nil, fmt.Errorf("list nftables rules of %s %s: %w", c.Table.Name, c.Name, err)
	}
	return rules, nil
}
