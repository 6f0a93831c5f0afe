"""The compressors that reduce an optimizer's buckets in ways of their own (GradientCompressor)."""
