"""Synthetic checkpoints: real shapes, names and encodings, random weights.

One file per architecture says which parameters a config asks for; `quantization` says how each is
stored, `values` draws them, `writer` puts them into files.
"""
