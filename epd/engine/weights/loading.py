"""Stage-only loading: an encode worker holds no language model, a prefill worker no vision tower.

Theory of operation
-------------------
The model class of transformers is built with every parameter on the meta device, and submodules of
other stages are dropped.  Only tensors that are left are read from the safetensors files.
Parameters go to meta by torch's hook for their registration, not with `torch.device("meta")`, which
would also ruin the non-persistent buffers (rope frequencies) that no checkpoint can restore.

Published checkpoints name their tensors as the model class did when they were saved.  A checkpoint
name is tried as it is, then through the family's renamings; the first that the model has wins.
A tensor that no stage of the model has is an error: config.json then describes a smaller model than
was saved, and that would answer without a word of warning.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from epd.engine.base import Progress, no_progress
from epd.engine.sharding import WHOLE, Shard
from epd.engine.weights import stored as stored_weights
from epd.engine.weights.dummies import Homes, Takers, check, dtype_of, dummies, give
from epd.engine.weights.open_file import OpenFile
from epd.engine.weights.pieces import Sources, StoredPiece, missing, sources_of
from epd.model_files.checkpoint import ModelError
from epd.model_files.model_directory import check_tensors, some

if TYPE_CHECKING:
    from epd.engine.adapter import ModelAdapter
    from epd.engine.weights.packed_linear import Keeper
    from epd.groups.device.tensor_parallel import Cut

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_building = threading.Lock()
LARGE_NBYTES = 64 << 20


class LargeOnMeta(TorchFunctionMode):
    """Experts of one layer may be more than this host has: what is as large as that is a parameter,
    and never there.  A mode is its thread's own."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.empty:
            like = func(*args, **options | {"device": "meta"})
            if like.nbytes > LARGE_NBYTES:
                return like
        return func(*args, **options)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have shapes but no weights; buffers are real.

    transformers has its initialisation switched off by a global flag, so one thread at a time.
    """
    from transformers.initialization import no_init_weights

    here = threading.get_ident()

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.device.type == "meta" or threading.get_ident() != here:
            return param
        return nn.Parameter(param.detach().to("meta"), requires_grad=False)

    with _building, no_init_weights(), LargeOnMeta():
        hook = register_module_parameter_registration_hook(on_meta)
        try:
            yield
        finally:
            hook.remove()


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a stage reads and from where: decided from names and shapes, before any byte is read."""

    model: nn.Module  # on meta, without the modules of the other stage
    wanted: dict[str, torch.Tensor]  # on meta, by the model's name
    sources: Sources  # of all stages
    tied: dict[str, str]  # parameter to the one that it shares memory with
    cuts: dict[str, Cut]  # what a rank keeps of a parameter, if not all of it
    shapes: dict[str, tuple[int, ...]]  # of whole parameters


def plan_stage(
    adapter: ModelAdapter,
    stage: str,
    *,
    dummy: bool = False,
    allow_unused: bool = False,
    shard: Shard = WHOLE,
) -> StagePlan:
    """The plan of one stage ("vision" or "language").

    `dummy`: nothing will be read.  `allow_unused`: tensors that no stage has are left out.  Raises
    ModelError, naming what is wrong.
    """
    checkpoint = adapter.checkpoint
    if not dummy:
        check_tensors(checkpoint, (stage,), allow_unused=allow_unused)
    try:
        with parameters_on_meta():
            model = adapter.build()
    except ModelError:
        raise  # it has its own remedy
    except Exception as error:  # whatever contradictory sizes trip over
        raise ModelError(
            f"{checkpoint.directory}/config.json does not describe a {adapter.model_type} "
            f"model ({error}); restore the file"
        ) from error
    held = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    sources, _ = sources_of(checkpoint.tensors, adapter.family, held)
    for path in adapter.other_modules(stage):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, None)
    tied = _tied_names(adapter, model, sources)
    cuts: dict[str, Cut] = {}
    if shard.size > 1:
        from epd.groups.device import tensor_parallel

        parallel = tensor_parallel.TensorParallel(adapter, model, shard)
        parallel.drop_added_twice()
        cuts = parallel.cuts()
    wanted = {n: t for n, t in model.state_dict().items() if n in sources or n not in tied}
    if not dummy and (lacking := missing(sources, {name: held[name] for name in wanted})):
        raise ModelError(f"{checkpoint.directory} lacks {some(lacking)}; install another release")
    if cuts:
        tensor_parallel.shrink(model, cuts)
        adapter.adopt_shard(model, shard)
    return StagePlan(model, wanted, sources, tied, cuts, held)


def load_stage(
    adapter: ModelAdapter,
    stage: str,
    dtype: torch.dtype,
    device: str,
    load_format: str = "auto",
    *,
    allow_unused: bool = False,
    progress: Progress = no_progress,
    shard: Shard = WHOLE,
    exchange: Callable[[nn.Module], Takers] = lambda model: {},
    keeping: Callable[[nn.Module], Iterable[nn.Module]] = lambda model: (),
    may_widen: bool = True,
    hosted: Callable[[nn.Module], Homes] = lambda model: {},
) -> nn.Module:
    """The model with the weights of one stage, in eval mode; what belongs to the other is None.

    `load_format` "dummy" makes weights on the device instead of reading them.  `shard`: a rank
    reads only what it keeps.  `exchange`: of modules on meta, before anything is read.  `keeping`:
    of a model, the parts whose linear layers keep weights as they are stored.  `may_widen`: other
    weights in few bits take `dtype`.  `hosted`: of a model, what lies elsewhere than on the device.
    Raises what `plan_stage` raises, and ModelError where a file cannot be read, or where a weight
    would become wide and may not.
    """
    dummy = load_format == "dummy"
    plan = plan_stage(adapter, stage, dummy=dummy, allow_unused=allow_unused, shard=shard)
    model, wanted = plan.model, plan.wanted
    joint = {*plan.tied, *plan.tied.values()}  # cut when they are compared
    cuts = {name: cut for name, cut in plan.cuts.items() if name not in joint}
    takers, homes = exchange(model), hosted(model)
    keepers: dict[str, Keeper] = {}
    for part in keeping(model):
        keepers |= _keepers(adapter, plan, part, takers, device, dummy=dummy)
    if dummy:
        if not may_widen:
            check(adapter.checkpoint.config, wanted.keys() - keepers.keys() - takers.keys())
        ways = takers, keepers, homes
        state = dummies(adapter.checkpoint.config, wanted, cuts, *ways, dtype, device)
    else:

        def told(done: int, total: int) -> None:
            progress(stage, done, total)

        stored = {piece.stored for name in wanted for piece in plan.sources[name]}
        kept = {piece.stored for name in keepers for piece in plan.sources[name]}
        passing = {piece.stored for name in takers for piece in plan.sources[name]}
        costs = sorted(kept), sorted(stored - kept - passing)
        stored_weights.settle(adapter.checkpoint, *costs, dtype, may_widen=may_widen)
        ways = takers, keepers, homes
        state = _read(adapter, plan.sources, wanted, cuts, *ways, dtype, device, told)
    for name, source in plan.tied.items():
        # Where both are stored the weights decide, as in transformers: some heads were trained on.
        if name not in state or torch.equal(state[name], state[source]):
            state[name] = state[source]
    state |= {name: plan.cuts[name].of(state[name]) for name in joint & plan.cuts.keys()}
    model.load_state_dict(state, strict=False, assign=True)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise ModelError(
            f"no weights for {some(left)}; the checkpoint is incomplete, copy it again"
        )
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return model.eval().requires_grad_(False)


def _keepers(
    adapter: ModelAdapter,
    plan: StagePlan,
    part: nn.Module | None,
    takers: Takers,
    device: str,
    *,
    dummy: bool,
) -> dict[str, Keeper]:
    """Of weights in few bits, by a parameter's name, what they are given to as stored."""
    fp8 = device == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)
    checkpoint = adapter.checkpoint

    def stays(name: str) -> bool:
        if dummy:
            bits = stored_weights.format_of(checkpoint.config, name)
            return bits is not None and (fp8 or not bits.has_fp8)
        pieces = plan.sources.get(name, [])
        fits = (
            piece.num_parts == 1
            and stored_weights.stays(checkpoint, piece.stored, fp8=fp8)
            and stored_weights.shape_of(checkpoint, piece.stored) == piece.fits(plan.shapes[name])
            for piece in pieces
        )
        return bool(pieces) and all(fits)

    small = {name for name in plan.wanted.keys() - takers.keys() if stays(name)}
    if part is None or not small:
        return {}
    from epd.engine.weights import kept_experts, packed_linear

    (prefix,) = (path for path, module in plan.model.named_modules() if module is part)
    keepers: dict[str, Keeper] = dict(packed_linear.exchange(part, prefix, small))
    return keepers | kept_experts.exchange(part, prefix, small)


def _tied_names(
    adapter: ModelAdapter, model: nn.Module, sources: Collection[str]
) -> dict[str, str]:
    """Parameter to the one that it shares memory with (the head and the embedding, usually)."""
    names: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    held = model.state_dict().keys()
    if (
        getattr(adapter.text_config, "tie_word_embeddings", False)
        and "lm_head.weight" in held
        and "lm_head.weight" not in sources
    ):
        # Some composite configs say it of the text part alone.
        (embedding,) = (name for name in held if name.endswith(".embed_tokens.weight"))
        names.setdefault("lm_head.weight", embedding)
    ties = {name: source for name, source in names.items() if name in held and source in held}
    # Whichever is stored gives its weights to the other.
    return dict(
        (source, name) if name in sources and source not in sources else (name, source)
        for name, source in ties.items()
    )


def _read(
    adapter: ModelAdapter,
    sources: Sources,
    wanted: Mapping[str, torch.Tensor],
    cuts: Mapping[str, Cut],
    takers: Takers,
    keepers: Mapping[str, Keeper],
    homes: Homes,
    dtype: torch.dtype,
    device: str,
    progress: Callable[[int, int], None],
) -> dict[str, torch.Tensor]:
    """The tensors, file by file, in the dtype of `dtype_of`.  Raises ModelError."""
    from safetensors import safe_open

    checkpoint = adapter.checkpoint
    by_file: dict[Path, list[tuple[str, StoredPiece]]] = defaultdict(list)
    for name in wanted:
        for piece in sources[name]:
            by_file[checkpoint.tensors[piece.stored].file].append((name, piece))
    state: dict[str, torch.Tensor] = {}
    done, total = 0, sum(_nbytes(wanted[n], dtype, cuts.get(n)) for n in wanted)
    for path, parts in by_file.items():
        try:
            with safe_open(path, framework="pt") as reader:
                file = OpenFile(reader, path, adapter, device)
                for name, piece in parts:
                    like, cut = wanted[name], cuts.get(name)
                    if name in keepers:
                        keepers[name](file.packed(name, piece, cut), piece)
                        done += _nbytes(like, dtype, cut)
                        progress(done, total)
                        continue
                    if name not in state:
                        kept = like if cut is None else cut.of(like)
                        kind = dtype_of(like, dtype)
                        make = homes.get(name, partial(torch.empty, device=device))
                        state[name] = make(kept.shape, dtype=kind)
                    place = piece.of(state[name])
                    place.copy_(file.tensor(name, piece, like, cut, dtype))
                    done += place.nbytes
                    progress(done, total)
                    if name in takers:
                        del place
                        give(state.pop(name), takers[name])
        except (MemoryError, torch.OutOfMemoryError, ModelError):  # the file is as it should be
            raise
        except Exception as error:  # safetensors raises its own error type from Rust, and OSError
            raise ModelError(f"{path} cannot be read ({error}); copy it again") from error
    return state


def _nbytes(like: torch.Tensor, dtype: torch.dtype, cut: Cut | None) -> int:
    kept = like if cut is None else cut.of(like)
    return kept.numel() * dtype_of(like, dtype).itemsize
