"""What torch_xla does behind one's back, each with its cure: the trap is shown to be there, and ours not to be in it.

The functions above the tests are programs, run as forks: torch_xla takes its device once, from the environment.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qat_lora import adapters, models
from qat_lora.cache import KDCacheDataset
from qat_lora.cli import commands
from qat_lora.config import AdapterConfig, ExecutionConfig, KDConfig, OptimConfig, PlaceConfig
from qat_lora.config.presets import scheme
from qat_lora.models.lean.mlps import use_lean_mlps
from qat_lora.models.lean.norms import use_lean_norms
from qat_lora.quant import freeze_codes, quantize_model
from qat_lora.runtime import LocalRuntime, runtime_for
from qat_lora.train import optim
from qat_lora.train.execution import lower_layers
from qat_lora.train.loop import TrainState, accumulate_gradients, train_step
from qat_lora.train.objective import Counts, KDObjective, Term
from qat_lora.train.optim import build_optimizer
from qat_lora.train.run import run_qat, run_recovery
from qat_lora.train.student import load_student, trained_parameters
from tests.conftest import VOCAB, cache_run, qat_run, recovery_run
from tests.runtime import programs

run_program = functools.partial(programs.run_program, module="tests.runtime.test_traps")
pytestmark = [
    pytest.mark.xla,
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
]
ON_XLA = PlaceConfig(device="tpu", dtype="fp32")


def tiny(family: str = "Qwen3", layers: int = 2, **settings) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    own = {"head_dim": 8} if family == "Qwen3" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, tie_word_embeddings=True, pad_token_id=0, bos_token_id=0, eos_token_id=0,
        **own, **settings,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def is_tied(model: nn.Module) -> bool:
    lm = models.causal_lm(model)
    return lm.lm_head.weight is lm.model.embed_tokens.weight


def counters(name: str) -> float:
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value(name) or 0


def caused(fn, *names: str) -> list[float]:
    """How much each counter grows in a call."""
    before = [counters(name) for name in names]
    fn()
    return [counters(name) - old for name, old in zip(names, before, strict=True)]


def models_on_xla() -> dict[str, Any]:
    """Traps of placing a model, of its forward, and of checkpointing."""
    found: dict[str, Any] = {"threads before": torch.autograd.is_multithreading_enabled()}
    runtime = runtime_for(ON_XLA, sync="optimizer")
    found["threads after"] = torch.autograd.is_multithreading_enabled()
    import torch_xla

    naive = tiny().to(runtime.device)
    found["naive is tied"] = is_tied(naive)
    for name in ("plain", "adapted"):
        model = tiny()
        if name == "adapted":
            model = adapters.attach(model, models.target_linears(model), AdapterConfig(), base_name="")
        before = [id(p) for p in model.parameters()]
        optimizer = build_optimizer([p for p in model.parameters() if p.requires_grad], [], OptimConfig())
        runtime.place(model)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found[name] = {
            "tied": is_tied(model),
            "the same": [id(p) for p in model.parameters()] == before,
            "optimizer holds them": held <= set(before),
            "devices": sorted({p.device.type for p in (*model.parameters(), *model.buffers())}),
        }
    found["swaps"] = torch.__future__.get_swap_module_params_on_conversion()

    ids = torch.randint(VOCAB, (2, 8)).to(runtime.device)
    torch_xla.sync()
    for family in ("Qwen3", "Llama"):
        model = runtime.place(tiny(family).requires_grad_(False))
        for name in ("naive", "ours"):
            if name == "ours":
                models.use_chunked_attention(model)
            reads, fallen_back = [], 0
            for _ in range(3):
                growth = caused(
                    lambda model=model: model(input_ids=ids, use_cache=False),
                    "aten::_local_scalar_dense", "UncachedCompile",
                )  # fmt: skip
                torch_xla.sync()
                reads.append(growth[0])
                fallen_back += growth[1]
            found[f"{name} {family}"] = {"host reads": reads, "compilations inside": fallen_back}
    found["checkpointing"] = checkpointing(runtime, ids)
    found["kept"] = kept(runtime, ids)
    return found


def kept(runtime, ids) -> dict[str, int]:
    """Bytes that the forward of an adapted model puts out, nearly all of them for backward."""
    import torch_xla
    from peft.tuners.lora import LoraLayer

    from qat_lora.adapters.attach import _LoraLinear

    found = {}
    for name in ("naive", "ours"):
        model = tiny(layers=3).requires_grad_(False)
        models.use_chunked_attention(model)
        model = adapters.attach(model, models.target_linears(model), AdapterConfig(), base_name="")
        if name == "ours":
            use_lean_norms(model)
            use_lean_mlps(model)
        else:
            for layer in model.modules():
                if type(layer) is _LoraLinear:
                    layer.__class__ = nn.Linear
        runtime.place(model).train()
        hidden_BTH = models.trunk_hidden(model, ids)
        runtime.mark_step("optimizer")
        hidden_BTH.sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found[f"{name} barriers"] = torch_xla._XLAC._get_xla_tensors_hlo(grads).count("opt-barrier(")
        found[f"{name} adapters"] = sum(isinstance(layer, LoraLayer) for layer in model.modules())
        found[name] = runtime.compilations()[-1].bytes_by_use["output"]
    return found


def checkpointing(runtime, ids) -> dict[str, Any]:
    """Barriers and dots in the HLO of a step, and how far its gradients are from those without checkpointing."""
    import torch_xla

    def gradients(how) -> tuple[str, dict[str, torch.Tensor]]:
        model = tiny(layers=3)
        models.use_chunked_attention(model)
        runtime.place(model).train()
        how(model)
        loss = model(input_ids=ids, use_cache=False).logits.square().mean()
        loss.backward()
        text = torch_xla._XLAC._get_xla_tensors_hlo([loss, *(p.grad for p in model.parameters())])
        torch_xla.sync()
        return text, {name: p.grad.cpu() for name, p in model.named_parameters()}

    text, expected = gradients(lambda model: None)
    ways = {
        "ours": lambda model: models.checkpoint_layers(model, runtime.checkpoint),
        "stock": lambda model: model.gradient_checkpointing_enable(),
    }
    found: dict[str, Any] = {"off": {"barriers": text.count("opt-barrier("), "dots": text.count(" dot(")}}
    for name in ("ours", "stock", "stock with a made-up torch.xla"):
        if name.endswith("torch.xla"):
            torch.xla = torch_xla  # what torch's own looks for
        try:
            text, grads = gradients(ways[name.split()[0]])
        except AttributeError as error:
            found[name] = {"error": str(error)}
            torch_xla.sync()
            continue
        share = max(((grads[n] - g).abs().max() / g.abs().max()).item() for n, g in expected.items())
        found[name] = {"barriers": text.count("opt-barrier("), "dots": text.count(" dot("), "off by": share}
    return found


class Squares:
    """A loss with as little in it as may be, so that what is counted is the optimizer's."""

    total_steps = 100

    def counts(self, batches, *, position) -> Counts:
        return Counts(*(torch.ones(3).to(batches[0]["input_ids"].device) + 0.5).unbind())

    def losses(self, model, batch, counts, *, step, position):
        yield Term(model(batch["input_ids"]).square().mean() / counts.positions, anchor=False)


def optimizers_on_xla() -> dict[str, list[float]]:
    """Compilations of each of the first steps, by how the optimizer is used."""
    runtime = runtime_for(ON_XLA, sync="optimizer")
    import torch_xla

    def placed_net(width: int) -> tuple[nn.Module, list[torch.Tensor]]:
        """Widths differ, so that no program is one of those before."""
        torch.manual_seed(0)
        model = runtime.place(nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3)))
        return model, [torch.randn(4, 5).to(runtime.device) for _ in range(4)]

    def naive(width: int, *, state: bool, to_none: bool, betas=(0.91, 0.987), lrs=(3e-3,) * 4) -> list[float]:
        """Torch's AdamW as it comes. Of its numbers none meet with these betas: see `build_optimizer`."""
        model, xs = placed_net(width)
        optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=0.0)
        for p in model.parameters() if state else ():
            zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.zeros(())} | zeros
        torch_xla.sync()
        counts = []
        for x, lr in zip(xs, lrs, strict=True):

            def step(x=x, lr=lr) -> None:
                model(x).square().mean().backward()
                optimizer.param_groups[0]["lr"] = lr
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
                torch_xla.sync()

            counts += caused(step, "UncachedCompile")
        return counts

    def ours(width: int, lrs=(3e-3,) * 4, sync="optimizer", **settings) -> list[float]:
        runtime.sync = sync
        model, xs = placed_net(width)
        trained = dict(model.named_parameters())
        weights = list(trained.values())
        settings_of = [OptimConfig(lr=lr, warmup_steps=0, min_lr_ratio=1.0, **settings) for lr in lrs]
        state = TrainState(model, trained, build_optimizer(weights[:2], weights[2:], settings_of[0]))
        if settings.get("ema_decay"):
            state.ema = {name: p.detach() * 1.0 for name, p in trained.items()}
        runtime.zero_grad(state.optimizer)
        runtime.mark_step("set-up")
        counts = []
        for x, own in zip(xs, settings_of, strict=True):
            batches = [{"input_ids": x}, {"input_ids": x}]
            step = lambda b=batches, o=own: train_step(state, b, Squares(), o, runtime)  # noqa: E731
            counts += caused(step, "UncachedCompile")
        return counts

    return {
        "state made lazily": naive(7, state=False, to_none=True),
        "gradients None at first": naive(8, state=True, to_none=False),
        "a rate of 0": naive(9, state=True, to_none=True, lrs=(0.0, 1e-3, 2e-3, 3e-3)),
        "numbers that coincide": naive(11, state=True, to_none=True, betas=(0.9, 0.99)),
        "ours": ours(12),
        "ours, a rate of 1": ours(13, lrs=(1e-3, 2e-3, 1.0, 3e-3)),
        "ours, a rate of 1 first": ours(14, lrs=(1.0, 1e-3, 2e-3, 3e-3)),
        "ours, with an average and decay": ours(15, ema_decay=0.9, weight_decay=0.1),
        "ours, betas alike": ours(16, beta1=0.9, beta2=0.9),
        "ours, cut after every phase": ours(17, sync="phase"),
        "ours, cut after every micro-batch": ours(18, sync="step"),
    }


def scanned_steps(cache: str) -> dict[str, Any]:
    """Loss, gradients and dots of a step with layers one by one and scanned, at two depths, in both stages."""
    runtime = runtime_for(ON_XLA, sync="optimizer")
    import torch_xla

    dataset = KDCacheDataset(Path(cache), preload=True)
    batch = next(dataset.batches(2))

    def step(stage: str, layers: int, execution: ExecutionConfig):
        model = tiny(layers=layers).eval()
        targets = models.target_linears(model)
        quantize_model(model, scheme("q2_g32"), targets)
        if stage == "qat":
            weights, scales = trained_parameters(model, ("weights", "scales"))
            trained = weights | scales
        else:
            freeze_codes(model)
            model = adapters.attach(model, targets, AdapterConfig(), base_name="")
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            for p in trained.values():
                p.data.add_(0.05 * torch.randn_like(p))  # B starts at zero, which would hide A's gradient
        models.place(model, runtime)
        lower_layers(model, execution, runtime, tokens=64)
        optimizer = build_optimizer(trained.values(), [], OptimConfig())
        objective = KDObjective(KDConfig(temperature=2.0), dataset.manifest.target_spec, runtime, total_steps=4)
        state = TrainState(model.train(), trained, optimizer)
        runtime.zero_grad(optimizer)
        torch_xla.sync()
        loss = accumulate_gradients(state, [runtime.to_device(batch)], objective, runtime, first_position=0)
        text = torch_xla._XLAC._get_xla_tensors_hlo([loss, *(p.grad for p in trained.values())])
        torch_xla.sync()
        return loss.item(), {name: p.grad.cpu() for name, p in trained.items()}, text.count(" dot(")

    found: dict[str, Any] = {}
    for stage in ("qat", "recover"):
        one_by_one = {depth: step(stage, depth, ExecutionConfig(gradient_checkpointing="off")) for depth in (2, 3)}
        scanned = {depth: step(stage, depth, ExecutionConfig(scan_layers=True)) for depth in (2, 3)}
        grads, expected = scanned[3][1], one_by_one[3][1]
        assert grads.keys() == expected.keys() and all(g.any() for g in expected.values())
        found[stage] = {
            "losses": [one_by_one[3][0], scanned[3][0]],
            "off by": max(((grads[n] - g).abs().max() / g.abs().max()).item() for n, g in expected.items()),
            "dots": [one_by_one[2][2], one_by_one[3][2]],
            "dots scanned": [scanned[2][2], scanned[3][2]],
        }
    return found


def averages_on_xla() -> dict[str, Any]:
    """A moving average after its swap with the weights and an update in place of these; then with plain clones."""
    runtime = runtime_for(ON_XLA)
    ours = optim._copied

    def average_of(copied) -> list[float] | str:
        optim._copied = copied
        p = nn.Parameter(torch.arange(5.0).to(runtime.device))
        ema = optim.averages_of({"p": p})
        with optim.swapped_in(ema, {"p": p}, runtime):
            pass
        with torch.no_grad():
            p.mul_(3)
        runtime.mark_step("optimizer")
        optim.update_ema(ema, {"p": p}, 0.5)
        try:
            runtime.mark_step("optimizer")
            return ema["p"].tolist()
        except RuntimeError as error:
            return str(error).splitlines()[0]

    return {"ours": average_of(ours), "clones": average_of(lambda x: x.detach().clone())}


class NoDisk(Exception):
    pass


class Failing:
    """Two batches, and then an error."""

    def __len__(self) -> int:
        return 5

    def __iter__(self):
        for value in range(2):
            yield {"x": torch.full((2,), float(value))}
        raise NoDisk("the disk is gone")


def resumed_with_dropout(cache: Path, folder: Path, student: Path, runtime) -> dict[str, Any]:
    """Whether a run with dropout that was cut off in the middle ends as the whole one; and whether it dropped out."""

    def run(output: Path, p: float, **how) -> dict[str, torch.Tensor]:
        settings = recovery_run(
            cache, output, student, loop={"max_steps": 4, "save_every": 2, "accumulation_steps": 2},
            execution=ExecutionConfig(max_recompiles=0), adapter=AdapterConfig(recovery_dropout=p),
        )  # fmt: skip
        trained = run_recovery(settings, runtime, **how).state.trained
        return {name: x.detach().cpu() for name, x in trained.items()}

    class CopyAtTwo:
        every = 2

        def start(self, state): ...

        def after_step(self, state, info):
            if info.step == 2:
                shutil.copytree(folder / "dropping", folder / "cut off")

        def end(self, state): ...

    whole = run(folder / "dropping", 0.25, hooks=[CopyAtTwo()])
    runtime.seed(12345)  # a resumed run must not depend on the state it is started in
    resumed = run(folder / "cut off", 0.25, launch="resume")
    without = run(folder / "not dropping", 0.0)
    return {
        "the same": all(torch.equal(x, resumed[name]) for name, x in whole.items()),
        "others without": not all(torch.equal(x, without[name]) for name, x in whole.items()),
    }


def runs_on_xla(cache: str, folder: str, student: str) -> dict[str, Any]:
    """A run with every loss term, fallbacks to the CPU, memory lines, and what a loader's error does."""
    runtime = runtime_for(ON_XLA)
    import torch_xla
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    # k < V, hence a tail; top_k halves what is cached
    kd = KDConfig(
        temperature=2.0, top_k=8, hard_weight=0.3, hard_anneal="linear", ce_alpha=0.2, anchor_kl_weight=0.5,
        anchor_samples=4,
    )  # fmt: skip

    def run(name: str, level: str):
        execution = ExecutionConfig(max_recompiles=0, mem_debug=level)
        loop = {"max_steps": 3, "log_every": 1, "eval_rows": 4}
        output = Path(folder) / name
        settings = recovery_run(Path(cache), output, Path(student), kd=kd, loop=loop, execution=execution)
        return run_recovery(settings, runtime)

    found: dict[str, Any] = {}
    compiled = len(runtime.compilations())
    for name, level in (("first", "off"), ("second", "off"), ("watched", "hlo")):
        run(name, level)
        found[f"{name} compiles"] = len(runtime.compilations()) - compiled
        compiled = len(runtime.compilations())
    found["fallbacks"] = [name for name in runtime.metrics() if name.startswith("aten::")]
    found["dropout"] = resumed_with_dropout(Path(cache), Path(folder), Path(student), runtime)
    lines = [json.loads(line) for line in (Path(folder) / "watched" / "memory.jsonl").read_text().splitlines()]
    found["lines"] = [[line["when"], line["step"], sorted(line)] for line in lines]
    found["graphs"] = [[g["phase"], len(g["hash"]), g["inputs"]] for g in lines[-1]["graphs"]]
    found["tensors"] = lines[-1]["tensors"]
    found["counted"] = lines[-1]["metrics"]["UncachedCompile"]
    held = torch.ones(17, 3, device=runtime.device)
    torch_xla.sync()
    found["a read compiles"] = caused(lambda: held.sum().item(), "UncachedCompile")[0]
    torch.logaddexp(held, held)
    found["fallbacks of logaddexp"] = counters("aten::logaddexp.out") + counters("aten::logaddexp")

    seen: list[float] = []
    try:
        for batch in runtime.wrap_loader(Failing()):
            assert batch["x"].device.type == "xla"
            seen.append(batch["x"].mean().item())
        found["ours"] = [seen, "ended"]
    except NoDisk as error:
        found["ours"] = [seen, str(error)]
    whole = runtime.wrap_loader({"x": torch.full((2,), float(value))} for value in range(9))
    found["whole"] = [batch["x"].mean().item() for batch in whole]

    ended: list[str] = []

    def naive() -> None:
        try:
            for _ in MpDeviceLoader(Failing(), runtime.device):
                pass
            ended.append("in silence")
        except Exception as error:
            ended.append(str(error))

    threading.excepthook = lambda args: None
    thread = threading.Thread(target=naive, daemon=True)
    thread.start()
    thread.join(timeout=2)
    found["naive"] = ended or ["never"]
    return found


def across_devices(cache: str, folder: str) -> dict[str, Any]:
    """Both stages on both devices, whole, and cut after half of the steps and gone on with on the other device."""
    there = Path(folder)
    runtimes = {"xla": runtime_for(ON_XLA), "cpu": runtime_for(PlaceConfig(device="cpu"))}
    settings = {
        "loop": {"max_steps": 6, "save_every": 3, "log_every": 1, "eval_every": 2},
        "optim": OptimConfig(lr=1e-3, warmup_steps=2, ema_decay=0.5),
        "execution": ExecutionConfig(max_recompiles=0),
        "kd": KDConfig(anchor_kl_weight=0.1, anchor_samples=4),
    }
    found: dict[str, Any] = {}
    student = None
    for stage in ("qat", "recover"):
        for name, other in (("xla", "cpu"), ("cpu", "xla")):
            output = there / stage / name
            if stage == "qat":
                run, go = qat_run(Path(cache), output, preset="q4_g32", **settings), run_qat
            else:
                run, go = recovery_run(Path(cache), output, student, **settings), run_recovery
            whole = go(run, runtimes[name])
            if name == "xla":
                found[f"{stage} logits"] = reloaded(whole, Path(cache))
            crossed = there / stage / f"{name}-{other}"
            shutil.copytree(output, crossed)
            shutil.copyfile(output / "step-000003.pt", crossed / "last.pt")
            rest = go(replace(run, output=crossed), runtimes[other], launch="resume")
            moments = [x for state in rest.state.optimizer.state.values() for x in state.values()]
            found[f"{stage} {name}-{other}"] = {
                "whole": [row["loss"] for row in whole.losses.rows if row["loss"] == row["loss"]],
                "crossed": [row["loss"] for row in rest.losses.rows if row["loss"] == row["loss"]],
                "kl": [whole.state.last_kl, rest.state.last_kl],
                "moments on": sorted({x.device.type for x in moments}),
                "steps": rest.state.step,
            }
        student = there / stage / "xla" / "best.pt"
    return found


@torch.no_grad()
def reloaded(result, cache: Path) -> float:
    """How far the logits of a checkpoint, read back on the CPU, are from those on the device, by the largest."""
    model = result.state.model.eval()
    ids = torch.arange(2, 26).view(2, 12)
    on_device = model(input_ids=ids.to(model.device), use_cache=False).logits.cpu()
    loaded = models.load(KDCacheDataset(cache).manifest.teacher)
    student, _ = load_student(loaded, result.best.parent / "last.pt")
    on_cpu = student(input_ids=ids, use_cache=False).logits
    assert on_cpu.device.type == "cpu"
    return ((on_cpu - on_device).abs().max() / on_cpu.abs().max()).item()


@pytest.fixture(scope="module")
def on_xla() -> dict[str, Any]:
    return run_program("models_on_xla")


@pytest.mark.parametrize("kind", ["plain", "adapted"])
def test_placing_a_model_keeps_its_ties_and_its_parameters_which_to_alone_does_not(kind, on_xla) -> None:
    """`.to` makes other parameters: an untied head is trained apart, and an optimizer made before it trains nothing."""
    assert not on_xla["naive is tied"], "the trap is gone: torch_xla keeps ties by itself"
    assert on_xla[kind] == {"tied": True, "the same": True, "optimizer holds them": True, "devices": ["xla"]}
    assert not on_xla["swaps"], "the switch is set back"


def test_a_backward_runs_on_the_thread_that_asked_for_it(on_xla) -> None:
    """On a thread of autograd's own it lets go of tensors late, and graphs depend on when it does."""
    assert on_xla["threads before"]
    assert not on_xla["threads after"]


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_a_forward_reads_nothing_on_the_host_where_torchs_attention_reads_a_mask_each_time(family, on_xla) -> None:
    assert on_xla[f"naive {family}"]["host reads"] == [1, 1, 1], "the trap is gone: transformers reads no mask"
    assert on_xla[f"ours {family}"] == {"host reads": [0, 0, 0], "compilations inside": 0}


def test_checkpointing_has_barriers_where_torchs_own_crashes_or_saves_nothing(on_xla) -> None:
    found = on_xla["checkpointing"]
    assert found["off"]["barriers"] == 0
    assert "torch" in found["stock"]["error"], "the trap is gone: torch's own checkpoint runs on XLA"
    made_up = found["stock with a made-up torch.xla"]
    assert made_up["barriers"] == 0, "the trap is gone: torch's own has barriers"
    assert found["ours"]["barriers"] >= 3, "one for each layer at least"
    assert found["ours"]["dots"] == made_up["dots"] > found["off"]["dots"], "each layer is computed again"
    # not to the bit: fusions end at barriers (1.2e-6 of a gradient's largest entry seen)
    assert found["ours"]["off by"] <= 5e-6


def test_backward_keeps_no_tensor_beside_its_view(on_xla) -> None:
    """Torch's products keep views, each its base beside it; and a tensor that others give is not kept at all."""
    assert on_xla["kept"]["ours"] <= 0.55 * on_xla["kept"]["naive"]


def test_gradients_of_weights_are_not_put_off(on_xla) -> None:
    """One barrier for A and one for B of each adapter; but the input of q and v in layer 0 has no gradient."""
    assert on_xla["kept"]["naive barriers"] == 0
    assert on_xla["kept"]["ours barriers"] == 2 * on_xla["kept"]["ours adapters"] - 2


def test_nothing_is_compiled_after_the_first_step_of_the_optimizer_which_torchs_own_ways_all_do() -> None:
    found = run_program("optimizers_on_xla")
    traps = {name: counts for name, counts in found.items() if not name.startswith("ours")}
    ours = {name: counts for name, counts in found.items() if name.startswith("ours")}
    assert len(traps) == 4 and len(ours) == 7
    for name, counts in traps.items():
        assert counts[0] >= 1 and counts[1] >= 1 and not any(counts[2:]), f"the trap is gone: {name} {counts}"
    # counts, forward, backward and optimizer; gradients that are None at first would make another backward
    # the program of the counts is that of the run before
    programs = {"ours, cut after every phase": 4, "ours, cut after every micro-batch": 2}
    for name, counts in ours.items():
        assert counts == [programs.get(name, 1), 0, 0, 0], name


def test_moving_averages_have_memory_of_their_own_which_clones_have_not() -> None:
    found = run_program("averages_on_xla")
    assert found["ours"] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert "deleted" in found["clones"], "the trap is gone: a clone does not share its buffer"


@pytest.fixture(scope="module")
def tail_cache(tmp_path_factory, teacher_dir, text_file) -> Path:
    """A cache that leaves a tail: 16 of 211 candidates."""
    folder = tmp_path_factory.mktemp("tail") / "cache"
    commands.cache(cache_run(teacher_dir, text_file, folder, top_k=16, logprob_bits=32))
    return folder


@pytest.mark.parametrize("stage", ["qat", "recover"])
def test_scanned_layers_compute_the_same_in_a_program_that_does_not_grow_with_depth(stage, scanned) -> None:
    found = scanned[stage]
    plain, looped = found["losses"]
    assert looped == pytest.approx(plain, rel=2e-6)
    # other fusions in the loop's body: 4.2e-6 of a gradient's largest entry seen
    assert found["off by"] <= 2e-5
    assert found["dots"][1] > found["dots"][0], "the watch counts no dots"
    assert found["dots scanned"][1] == found["dots scanned"][0] < found["dots"][1]


@pytest.fixture(scope="module")
def scanned(tail_cache) -> dict[str, Any]:
    return run_program("scanned_steps", tail_cache)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tail_cache) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    student = run_qat(qat_run(tail_cache, folder / "student", loop={"max_steps": 3}), LocalRuntime("cpu")).best
    return run_program("runs_on_xla", tail_cache, folder, student)


def test_no_operation_of_a_run_with_every_loss_falls_back_to_the_cpu(runs) -> None:
    """The tail of k < V, hard targets, next tokens and the anchor; evaluation and checkpoints included."""
    assert runs["fallbacks of logaddexp"] >= 1, "the trap is gone: logaddexp runs on XLA"
    assert set(runs["fallbacks"]) <= {"aten::_local_scalar_dense"}


def test_memory_lines_at_their_most_compile_nothing(runs) -> None:
    assert runs["a read compiles"] == 1, "the watch sees no compilation"
    assert runs["first compiles"] > 0 == runs["second compiles"], "the same run again is compiled already"
    assert runs["watched compiles"] == 0
    assert [line[:2] for line in runs["lines"]] == [["start", 0], ["step", 1], ["step", 2], ["step", 3], ["end", 3]]
    assert all({"tensors", "metrics", "graphs"} <= set(line[2]) for line in runs["lines"])


def test_memory_lines_say_what_torch_xla_says(runs) -> None:
    assert runs["counted"] == len(runs["graphs"]) == runs["first compiles"]
    phases = [phase for phase, _, _ in runs["graphs"]]
    for phase in ("counts", "forward", "backward", "anchor forward", "anchor backward", "optimizer"):
        assert phases.count(phase) == 1, f"{phase} in {phases}"
    assert all(length == 32 for _, length, _ in runs["graphs"]), "each has a hash"
    assert runs["tensors"]["xla:0 float32"]["bytes"] > 0


def test_a_run_with_dropout_that_was_cut_off_ends_as_the_whole_one(runs) -> None:
    """The device draws its own numbers, which no state of the host's describes; --max-recompiles 0."""
    assert runs["dropout"] == {"the same": True, "others without": True}


def test_an_error_of_the_loader_reaches_the_caller_which_torch_xlas_own_keeps_to_itself(runs) -> None:
    assert runs["ours"] == [[0.0, 1.0], "the disk is gone"]
    assert runs["whole"] == [float(value) for value in range(9)]
    assert "the disk is gone" not in runs["naive"], "the trap is gone: torch_xla's loader raises"


@pytest.fixture(scope="module")
def crossings(tmp_path_factory, tail_cache) -> dict[str, Any]:
    return run_program("across_devices", tail_cache, tmp_path_factory.mktemp("crossings"))


@pytest.mark.parametrize("way", ["xla-cpu", "cpu-xla"])
@pytest.mark.parametrize("stage", ["qat", "recover"])
def test_a_run_with_moving_averages_is_resumed_on_the_other_device(stage, way, crossings) -> None:
    """Moments, averages and progress; --max-recompiles 0 on XLA."""
    found = crossings[f"{stage} {way}"]
    assert found["steps"] == len(found["crossed"]) == 6
    assert found["moments on"] == [way.split("-")[1]]
    # losses of 5e-4 are small differences of larger numbers, on two devices: 7e-5 seen
    assert found["crossed"] == pytest.approx(found["whole"], rel=5e-4)
    assert found["kl"][1] == pytest.approx(found["kl"][0], rel=2e-3)


@pytest.mark.parametrize("stage", ["qat", "recover"])
def test_a_checkpoint_of_xla_reads_back_on_the_cpu(stage, crossings) -> None:
    assert crossings[f"{stage} logits"] <= 5e-6
