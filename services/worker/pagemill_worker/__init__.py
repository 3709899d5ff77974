"""The worker: loads a model, owns its KV cache, carries out plans and samples."""
