"""The backend "cpu": the reference's numbers from compiled code. See backend.CpuBackend."""
