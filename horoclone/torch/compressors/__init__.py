"""The compressors that reduce an optimizer's buckets with their own sequence of operations (GradientCompressor)."""
