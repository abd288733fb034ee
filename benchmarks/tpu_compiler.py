"""Compile XLA programs for a TPU that is not there, and print what its compiler says of them as JSON.

Runs in an environment of its own (`benchmarks/tpu_compile.py` makes it): libtpu, the TPU's runtime and compiler,
compiles for a topology on a machine without a chip. Nothing is run.

    python tpu_compiler.py v6e:1x1 PROGRAM [PROGRAM ...]       each PROGRAM a file with an HloModuleProto

One line of JSON per program: bytes of arguments, outputs, aliased arguments, temporaries and generated code; FLOPs and
bytes accessed by XLA's cost analysis (which counts the body of a loop once); compile seconds; or the compiler's error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.update(TPU_SKIP_MDS_QUERY="1", JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jaxlib import _jax, xla_client

_USES = {
    "argument": "argument_size_in_bytes",
    "output": "output_size_in_bytes",
    "alias": "alias_size_in_bytes",
    "temporary": "temp_size_in_bytes",
    "code": "generated_code_size_in_bytes",
}


def compile_program(client, device, proto: bytes) -> dict:
    """Compile one program for one chip and return what the compiler says of it."""
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]]))
    text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(proto))
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
    started = time.perf_counter()
    try:
        executable = client.compile(module, _jax.DeviceList((device,)), options)
    except Exception as error:  # whatever the compiler refuses is the result
        return {"error": " ".join(str(error).split())[:2000], "compile_seconds": time.perf_counter() - started}
    seconds = time.perf_counter() - started
    memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    return {
        "compile_seconds": seconds,
        **{f"{use}_bytes": int(getattr(memory, name)) for use, name in _USES.items()},
        "flops": float(cost.get("flops", 0.0)),
        "bytes_accessed": float(cost.get("bytes accessed", 0.0)),
    }


def main(topology_name: str, paths: list[str]) -> None:
    """Compile every program and print a line for each."""
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=topology_name, chips_per_host_bounds=[1, 1, 1]
    )
    device = topology.devices[0]
    for path in paths:
        result = compile_program(device.client, device, Path(path).read_bytes())
        print(json.dumps({"program": path} | result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
