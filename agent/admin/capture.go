package admin

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

// Capture leads connections of applications to this agent.
type Capture interface {
	// View tells what is in force.
	View() *meshv1.GetCaptureResponse
	// Stop ends it, and returns what was removed.
	Stop(ctx context.Context) ([]string, error)
}

func (s *adminServer) GetCapture(context.Context, *meshv1.GetCaptureRequest) (*meshv1.GetCaptureResponse, error) {
	if s.cfg.Capture == nil {
		return &meshv1.GetCaptureResponse{}, nil
	}
	return s.cfg.Capture.View(), nil
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
