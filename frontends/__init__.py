"""Frontends: checkpoints to IR.

`checkpoint` reads folders safely and lazily, `config` and `quantization` interpret them, `targets`
and `drafts` hold one file per architecture, and `lift` puts a pair into one module.
"""
