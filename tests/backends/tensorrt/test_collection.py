"""Collecting an old builder inside a callback would wait for ever: see `uncollected`."""

from __future__ import annotations

import gc

from edgecc.backends.tensorrt import builder
from edgecc.backends.tensorrt.builder import Session
from edgecc.backends.tensorrt.lower import build
from edgecc.devices import get_device
from edgecc.ir import Builder, DType, Module, Role


def test_no_collection_starts_inside_a_callback(trt, monkeypatch, tmp_path):
    logged, stepped = [], []

    def recording(library, errors):
        class Log(library.ILogger):
            def __init__(self):
                library.ILogger.__init__(self)

            def log(self, severity, message):
                logged.append(gc.isenabled())

        return Log()

    monkeypatch.setattr(builder, "error_log", recording)
    session, _second = (Session(trt, get_device("sm86")) for _ in range(2))
    assert logged  # at least that the second logger is another one
    b = Builder(Module("m"), "main")
    x = b.input("x", DType.F32, (2, 3), Role.ACTIVATION)
    b.output(b.op("add", x, x), "y", Role.ACTIVATION)
    graph = b.module.graphs["main"]
    path = tmp_path / "main.plan"
    build(session, b.module, graph, (), path, lambda *step: stepped.append(gc.isenabled()))
    assert stepped
    assert not any(logged + stepped)
    assert gc.isenabled()
