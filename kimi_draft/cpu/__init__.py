"""Run SGLang on any CPU."""
