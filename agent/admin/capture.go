package admin

import (
	"context"
	"errors"
	"net/netip"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

// Capture leads connections of applications to this agent.
type Capture interface {
	// View tells what is in force.
	View() *meshv1.GetCaptureResponse
	// Check reports whether a connection has come to this agent, and what is wrong with those of its own.
	Check(ctx context.Context, from, to netip.AddrPort) (arrived bool, loop string, err error)
	// Stop ends it, and returns what was removed.
	Stop(ctx context.Context) ([]string, error)
}

func (s *adminServer) GetCapture(context.Context, *meshv1.GetCaptureRequest) (*meshv1.GetCaptureResponse, error) {
	if s.cfg.Capture == nil {
		return &meshv1.GetCaptureResponse{}, nil
	}
	return s.cfg.Capture.View(), nil
}

func (s *adminServer) CheckCapture(ctx context.Context, req *meshv1.CheckCaptureRequest) (*meshv1.CheckCaptureResponse, error) {
	from, fromErr := netip.ParseAddrPort(req.From)
	to, toErr := netip.ParseAddrPort(req.To)
	if err := errors.Join(fromErr, toErr); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "from, to: want IP:PORT: %v", err)
	}
	if s.cfg.Capture == nil {
		return nil, status.Error(codes.FailedPrecondition, "this agent does not capture")
	}
	arrived, loop, err := s.cfg.Capture.Check(ctx, from, to)
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return &meshv1.CheckCaptureResponse{Arrived: arrived, Loop: loop}, nil
}

func (s *adminServer) StopCapture(ctx context.Context, _ *meshv1.StopCaptureRequest) (*meshv1.StopCaptureResponse, error) {
	if s.cfg.Capture == nil {
		return &meshv1.StopCaptureResponse{}, nil
	}
	removed, err := s.cfg.Capture.Stop(ctx)
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &meshv1.StopCaptureResponse{Removed: removed}, nil
}
