"""The Megatron-core learner. Everything that imports megatron lives here; start at worker.LearnerWorker."""
