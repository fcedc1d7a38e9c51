"""SGLang as the sampler. Everything in miniTE that imports sglang lies here, and nothing of it is imported early."""
