"""Facts about ops that do not depend on a model: effects, sizes, timing, generator states, settings."""
