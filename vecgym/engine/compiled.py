"""The backend `compiled`: `vmap`, with the gradients of all nodes traced and compiled by `torch.compile`.

Before training, the first batch shows whether a model can be compiled: `Compiled.tried` compares the compiled gradients
with those of `vmap`, and reports the time of compiling, and after how many steps it is earned.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from vecgym.core import tree
from vecgym.core.nodes import expand
from vecgym.core.tree import Tree
from vecgym.engine.backend import NodeSlice, apart, difference, first_part, settle, timed
from vecgym.engine.contract import cause
from vecgym.engine.stateless import StatelessModel, plain_attention
from vecgym.engine.vmap import Vmap

MANY = 10**6


class Compiled(Vmap):
    """All nodes at once, as one compiled function; evaluation and derivatives of gradients are those of `vmap`.

    Another batch size, or another number of nodes, is compiled when it first occurs. On CUDA the kernels of a pass are
    recorded as a CUDA graph, which launches them in one call. Its next call overwrites its results: they must not be
    kept. (torch raises an error if they are.) A model that changes its buffers is not recorded.
    """

    def __init__(self, model: StatelessModel) -> None:
        super().__init__(model)
        self.recorded = model.device.type == "cuda"
        compile = functools.partial(torch.compile, fullgraph=True, dynamic=False, options=_options(self.recorded))
        self._compiled_each = compile(self._gradients_of_each)
        self._compiled_mean = compile(self._gradient_of_mean)
        self._sizes: set[Any] = set()  # that are compiled

    def _computed(self, part: NodeSlice, num_nodes: int, thread: int = 0) -> tuple[Tree, Tensor]:
        changed, shared = self.model.split(part.buffers)
        if num_nodes:
            compiled, params = self._compiled_mean, {name: p[0] for name, p in part.params.items()}
        else:  # contiguous even if stored once: strides of 0 would be another function to compile
            compiled, params = self._compiled_each, tree.map(torch.Tensor.contiguous, expand(part.params, part.size))
        with self.model.casting(), torch.no_grad():
            if self.recorded:
                torch.compiler.cudagraph_mark_step_begin()  # the results of the last call are no longer needed
            grads, losses, after = self._call(compiled, params, changed, {**self.model.frozen, **shared}, part.batch)
        settle(changed, after)
        used = [name for name in grads if name not in self.model.unused]  # those of torch.func are 0
        grads = dict(zip(used, apart([grads[name] for name in used])))
        if num_nodes not in (0, part.size):  # the mean of a chunk
            grads = tree.map(lambda g: g * (part.size / num_nodes), grads)
        return grads, losses.clone()  # losses are read a few steps later

    def _call(self, compiled: Callable[..., Any], *arguments: Any) -> Any:
        """Call a compiled function; only the first call of each size has the settings of tracing.

        Entering them takes as long as the gradients of a small model. torch counts the compilations of a function, over
        all models of the process, and stops at eight: that limit is lifted, since each model is compiled for as many
        sizes as it has.
        """
        size = compiled, *[(x.shape, x.stride(), x.dtype) for x in tree.leaves(arguments)]
        if size in self._sizes:
            with contextlib.suppress(Exception):  # of another compilation: a value that the code reads has changed
                return compiled(*arguments)
        limits = torch._dynamo.config.patch(cache_size_limit=MANY, accumulated_cache_size_limit=MANY)
        with sdpa_kernel(SDPBackend.MATH), limits:
            result = compiled(*arguments)
        self._sizes.add(size)
        return result

    def _gradients_of_each(self, params: Tree, changed: Tree, shared: Tree, batch: Any) -> tuple[Tree, Tensor, Tree]:
        of_one = grad_and_value(self.model.traceable_loss, has_aux=True)
        on_nodes = vmap(of_one, in_dims=(0, 0, None, 0), randomness="different")
        grads, (losses, after) = on_nodes(params, changed, shared, batch)
        return grads, losses, after

    def _gradient_of_mean(self, params: Tree, changed: Tree, shared: Tree, batch: Any) -> tuple[Tree, Tensor, Tree]:
        def mean_loss(params: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
            on_nodes = vmap(self.model.traceable_loss, in_dims=(None, 0, None, 0), randomness="different")
            losses, after = on_nodes(params, changed, shared, batch)
            return losses.mean(), (losses, after)

        grads, (losses, after) = grad(mean_loss, has_aux=True)(params)
        return grads, losses, after

    @plain_attention()
    def tried(self, batch: Any, mean: bool, autocast: bool) -> tuple[str, str]:
        """Compile, compare with `vmap`, and time both; return why this backend is not used, or a report.

        Args:
            batch: of the nodes in one call, leaves `[n, B, ...]`.
            mean: try the gradient of the mean loss instead of those of each node.

        Raises:
            RuntimeError: if there is no compiler.
        """
        reference, work = Vmap(self.model), functools.partial(first_part, self.model, mean=mean)
        expected, _ = timed(reference, work(batch), mean)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch.compile about itself
                actual, compile_s = timed(self, work(batch), mean)
                with torch._dynamo.config.patch(error_on_recompile=True):
                    timed(self, work(batch), mean)
        except torch._dynamo.exc.RecompileError as error:
            return f"{_changed(error)}, so that every step would compile it anew: keep that in a buffer", ""
        except Exception as error:  # whatever the compiler raises: without it the model runs
            return _refusal(error), ""
        if wrong := difference(expected, actual, autocast):
            return f"compiled, {wrong}", ""
        plain_s, compiled_s = (min(timed(form, work(batch), mean)[1] for _ in range(3)) for form in (reference, self))
        # On CUDA the last calls replayed a recording: with another batch it must compute that batch's results.
        expected, actual = (timed(form, work(_turned(batch)), mean)[0] for form in (reference, self))
        if wrong := difference(expected, actual, autocast):
            return f"compiled, {wrong}", ""
        steps = math.ceil(compile_s / (plain_s - compiled_s)) if plain_s > compiled_s else None
        earned = "no faster here" if steps is None else f"earned after {steps} steps"
        return "", f"compiled in {compile_s:.1f} s, {earned}"


def _turned(batch: Any) -> Any:
    """Return another batch of the same shapes.

    >>> _turned((torch.tensor([[1, 2], [3, 4]]),))
    (tensor([[4, 3],
            [2, 1]]),)
    """
    return tree.map_leaves(lambda x: x.flip(0, *([1] if x.dim() > 1 else [])), batch)


def _refusal(error: BaseException) -> str:
    """Return the reason why a model cannot be compiled.

    Raises:
        RuntimeError: with the fix, if no compiler was found.
    """
    inner: Any = error
    chained: BaseException | None = error
    while chained is not None:
        inner = getattr(chained, "inner_exception", inner)  # the backend's error, within torch's
        text = str(chained).strip()
        missing = type(chained).__name__ in ("InvalidCxxCompiler", "TritonMissing")
        if missing or ("compiler" in text.lower() and "not found" in text.lower()):
            raise RuntimeError(
                "compile=True needs a C++ compiler, and torch.compile finds none that works: install one (g++ or "
                "clang++; for CUDA also Triton), set the environment variable CXX to it, or leave out "
                "compile=True.\n" + text.partition("\n")[0]
            ) from error
        chained = chained.__cause__ or chained.__context__
    context = re.search("Developer debug context: (.*)", str(error)) if "Observed exception" in str(error) else None
    return f"Observed exception: {context[1][:200]}" if context else cause(inner)


def _changed(error: Exception) -> str:
    """Describe the cause of a recompilation: its message has the guard, the line of code, and its location."""
    match = re.search(r"^ *- \d+/\d+: (.*?)(?:\(HINT.*)?$", str(error), re.MULTILINE)
    guard, *code = [" ".join(part.split()) for part in match[1].split("#")] if match else [""]
    at = f", at {code[1]}" if len(code) > 1 else ""
    return f"its forward changes a value that is no tensor ({code[0] if code else guard}{at})"


def _options(recorded: bool) -> dict[str, Any]:
    """Return options of the compiler, with which dropout and the like draw the same random numbers as uncompiled.

    If a tensor's last dimension is shorter than a vector register (a bias of ten classes) and its loop is vectorised
    anyway, Inductor assumes that it has no steps, and spreads the sum within it over the threads, once for each node.
    Such loops are therefore not vectorised.

    Args:
        recorded: record the kernels as a CUDA graph.
    """
    from torch._inductor import config  # imported here, since that takes a second

    tails = {"cpp.enable_loop_tail_vec": False} if hasattr(config.cpp, "enable_loop_tail_vec") else {}
    return {"fallback_random": True, "triton.cudagraphs": recorded, **tails}
