"""The corrected EAGLE3-MLA draft for Kimi-K2.5, and everything else that touches SGLang."""
