"""What `scripts/gpu_check.sh` runs: correctness and speed of pagemill on a GPU."""
