"""Shards and batches: those of DistributedSampler and DataLoader, and a function of (seed, step, node)."""

from __future__ import annotations

import multiprocessing
import random
import warnings
from collections import UserDict, namedtuple
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from vecgym.core import rng, tree
from vecgym.core.errors import VecgymWarning
from vecgym.data import Batches, EvalBatches, TokenWindows, checks, decode_text, encode_text, num_steps, source
from vecgym.data import batches as batches_module

Pair = namedtuple("Pair", ["x", "y"])


class Squares(Dataset):
    """Reads one example at a time, and counts what it reads."""

    def __init__(self, length: int, make=lambda i: (torch.tensor([i, i * i]), i)):
        self.length, self.make = length, make
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.make(index)


class Whole(Squares):
    """Reads a batch in one call, as a list of examples or as the batch already."""

    def __init__(self, length: int, batched: bool):
        super().__init__(length)
        self.batched, self.calls = batched, 0

    def __getitems__(self, indices: list[int]) -> Any:
        self.calls += 1
        i = torch.tensor(indices)
        examples = [(torch.tensor([i, i * i]), i) for i in indices]
        return (torch.stack([i, i * i], 1), i) if self.batched else examples


class Noisy(Dataset):
    """A random transform that draws from all three global generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()])  # noqa: NPY002


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def numbers(length: int) -> TensorDataset:
    i = torch.arange(length)
    return TensorDataset(torch.stack([i, i * i], 1), i)


def same(a: Any, b: Any) -> bool:
    """Equal values, dtypes and shapes, leaf by leaf."""
    a, b = list(tree.leaves(a)), list(tree.leaves(b))
    return len(a) == len(b) > 0 and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b))


def rows(batch: Any, nodes: slice | list[int]) -> Any:
    return tree.map_leaves(lambda x: x[nodes], batch)


def sampled(dataset: Any, num_nodes: int, node: int, epoch: int, shuffle: bool, seed: int = 3) -> DistributedSampler:
    sampler: DistributedSampler = DistributedSampler(dataset, num_nodes, node, shuffle=shuffle, seed=seed)
    sampler.set_epoch(epoch)
    return sampler


# ------------------------------------------------------------------------------------------- who reads what


@pytest.mark.filterwarnings("ignore:.*several nodes train on the same")
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("length", [1, 2, 5, 6, 16, 31, 32, 100])
def test_shards_are_those_of_distributed_sampler(length: int, num_nodes: int, shuffle: bool) -> None:
    batches = Batches(torch.arange(length), num_nodes, 1, seed=3, shuffle=shuffle)
    for epoch in [0, 1, 5]:
        start = epoch * batches.steps_per_epoch
        read = torch.cat(list(batches.iterate(start, start + batches.steps_per_epoch)), dim=1).tolist()
        assert read == [list(sampled(range(length), num_nodes, n, epoch, shuffle)) for n in range(num_nodes)]
    assert sum(batches.shard_sizes) == length


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("batch_size", [1, 3, 5, 8])
@pytest.mark.parametrize("dataset", [numbers(31), Squares(31), Whole(31, True), Whole(31, False)])
def test_batches_are_those_of_dataloader(dataset: Any, batch_size: int, drop_last: bool) -> None:
    batches = Batches(dataset, 4, batch_size, seed=3, dataloader_kwargs={"drop_last": drop_last})
    plain = numbers(31)
    expected = []
    for epoch in range(2):
        loaders = [
            DataLoader(plain, batch_size, sampler=sampled(plain, 4, n, epoch, True), drop_last=drop_last)
            for n in range(4)
        ]
        expected += [[torch.stack(leaf) for leaf in zip(*step)] for step in zip(*loaders)]
    assert len(expected) == 2 * batches.steps_per_epoch
    assert all(same(a, b) for a, b in zip(batches.iterate(), expected))


@pytest.mark.parametrize("kind", ["tensors", "examples", "whole", "list", "factory", "collate"])
def test_some_nodes_read_what_they_read_among_all(kind: str) -> None:
    datasets: dict[str, Any] = {
        "tensors": numbers(50),
        "examples": Squares(50),
        "whole": Whole(50, True),
        "list": Whole(50, False),
        "factory": lambda rank, num_nodes, train: numbers(6 + rank),
        "collate": Noisy(),
    }
    kwargs = {"collate_fn": default_collate} if kind == "collate" else {}
    make = lambda ids: Batches(  # noqa: E731
        datasets[kind], 6, 4, node_ids=ids, dataloader_kwargs=kwargs, agree=lambda longest: 11
    )
    whole = make(None)
    for ids in [[0], [5], [1, 2], [4, 0, 3], range(6)]:
        part = make(ids)
        assert part.steps_per_epoch == whole.steps_per_epoch
        assert part.shard_sizes == tuple(whole.shard_sizes[i] for i in ids)
        for step in [0, 1, 2, 3, 7]:
            assert same(part[step], rows(whole[step], list(ids)))


def test_nodes_of_a_factory_shuffle_by_their_own_key() -> None:
    batches = Batches(lambda rank, num_nodes, train: torch.arange(5) + 10 * rank, 2, 5, seed=9)
    for epoch in range(3):
        for node in range(2):
            order = torch.randperm(5, generator=rng.generator(9, "data", epoch, node))
            assert torch.equal(batches[epoch][node], order + 10 * node)
    assert not torch.equal(batches[0], batches[1])


def test_factory_is_called_once_per_node_here_with_positional_arguments() -> None:
    calls = []

    def factory(*args: Any) -> TensorDataset:
        calls.append(args)
        return numbers(4)

    Batches(factory, 4, 2, node_ids=[1, 3])
    Batches(factory, 4, 2, node_ids=[0], train=False)
    assert calls == [(1, 4, True), (3, 4, True), (0, 4, False)]


def test_shorter_nodes_repeat_up_to_the_longest() -> None:
    batches = Batches(lambda rank, num_nodes, train: torch.arange([3, 8][rank]), 2, 3)
    assert (batches.shard_sizes, batches.steps_per_epoch) == ((3, 8), 3)
    short, long = torch.cat([batches[0], batches[1], batches[2]], dim=1)
    assert sorted(long.tolist()) == list(range(8))
    assert short[:3].tolist() == short[3:6].tolist()
    assert short[6:].tolist() == short[:2].tolist()
    assert batches[2].shape == (2, 2)
    dropping = Batches(
        lambda rank, num_nodes, train: torch.arange([3, 8][rank]), 2, 3, dataloader_kwargs={"drop_last": True}
    )
    assert dropping.steps_per_epoch == 2


def test_a_factory_of_subsets_of_one_dataset_reads_as_one_gather() -> None:
    base = numbers(40)
    parts = [Subset(base, range(rank, 40, 4)) for rank in range(4)]
    batches = Batches(lambda rank, num_nodes, train: parts[rank], 4, 5)
    copies = Batches(lambda rank, num_nodes, train: TensorDataset(*base[rank::4]), 4, 5)
    assert len(batches._source._reader.datasets) == 1
    assert all(same(batches[step], copies[step]) for step in range(6))


@pytest.mark.parametrize("base", [numbers(30), Squares(30), Whole(30, True), numbers(30).tensors[1]])
def test_subsets_of_subsets(base: Any) -> None:
    once = list(range(29, 3, -1))
    twice = [5, 0, 7, 7, 20, 11]
    whole = Batches(Subset(Subset(base, once), twice), 2, 3, shuffle=False)
    read = list(tree.leaves(whole[0]))[-1]
    assert read.tolist() == [[once[twice[i]] for i in range(n, 6, 2)] for n in range(2)]


def test_subsets_may_count_from_the_end() -> None:
    batches = Batches(Subset(numbers(30), [-1, 3]), 1, 2, shuffle=False)
    assert batches[0][1].tolist() == [[29, 3]]


def test_a_tensor_dataset_that_reads_in_its_own_way_is_asked() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return tuple(2 * x for x in super().__getitem__(index))

    batches = Batches(Doubled(torch.arange(4)), 2, 2, shuffle=False)
    assert batches[0][0].tolist() == [[0, 4], [2, 6]]


# ----------------------------------------------------------------------------------- random access, resume


@pytest.mark.parametrize("dataset", [numbers(41), Squares(41), Noisy()])
def test_resuming_equals_not_stopping(dataset: Any) -> None:
    make = lambda: Batches(dataset, 3, 4, seed=1)  # noqa: E731
    whole = list(make().iterate(0, 12))
    for start in [0, 1, 3, 4, 11]:
        assert all(same(a, b) for a, b in zip(make().iterate(start, 12), whole[start:], strict=True))
        assert same(make()[start], whole[start])
    backwards = make()
    assert all(same(backwards.batch(step), whole[step]) for step in range(11, -1, -1))


def test_resuming_reads_nothing_of_what_it_skips() -> None:
    dataset = Squares(24)
    batches = Batches(dataset, 2, 3)
    next(batches.iterate(1001))
    assert len(dataset.read) == 6


def test_one_call_for_all_nodes() -> None:
    dataset = Whole(24, True)
    Batches(dataset, 4, 3)[0]
    assert (dataset.calls, dataset.read) == (1, [])


def test_only_two_epochs_are_kept() -> None:
    batches = Batches(torch.arange(12), 2, 3)
    for step in range(20):
        batches[step]
    assert len(batches._orders) == 2
    assert batches._orders[9].shape == (2, 6)


def test_iterating_repeats_without_end_and_num_steps_says_where_to_stop() -> None:
    batches = Batches(torch.arange(10), 2, 2)
    assert len(list(islice(batches, 50))) == 50
    assert list(batches.iterate(5, 5)) == []
    assert batches.steps_per_epoch == 3
    assert (num_steps(batches), num_steps(batches, 4), num_steps(batches, 4, 7)) == (3, 12, 7)
    with pytest.raises(ValueError, match="num_epochs=-1 must be an integer >= 0"):
        num_steps(batches, -1)


def test_seeds_differ() -> None:
    first, second = (Batches(torch.arange(100), 2, 50, seed=seed)[0] for seed in (0, 1))
    assert not torch.equal(first, second)


def test_random_transforms_depend_on_seed_step_and_node_alone() -> None:
    first, again = Batches(Noisy(), 3, 4), Batches(Noisy(), 3, 4, node_ids=[2])
    torch.manual_seed(0)
    whole = [first[step] for step in range(4)]
    torch.manual_seed(1)
    assert all(same(again[step], whole[step][2:]) for step in (3, 0, 1))
    draws = torch.cat([x[..., 1:].flatten() for x in whole])
    assert len(draws.unique()) == len(draws)


# -------------------------------------------------------------------------------- workers and random states


def global_states() -> list[Any]:
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), numpy_state[1].tolist(), numpy_state[2:], random.getstate()]


@pytest.mark.parametrize("kind", ["examples", "collate"])
def test_workers_change_nothing(kind: str) -> None:
    collate = {"collate_fn": pad} if kind == "collate" else {}
    here = Batches(Noisy(), 3, 3, dataloader_kwargs=collate)
    kwargs = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 2, **collate}
    there = Batches(Noisy(), 3, 3, dataloader_kwargs=kwargs)
    before = global_states()
    got = list(there.iterate(2, 9))
    assert before == global_states()
    assert all(same(a, b) for a, b in zip(got, here.iterate(2, 9), strict=True))
    if kind == "examples":
        evaluated = list(EvalBatches(Noisy(), 5, dataloader_kwargs=kwargs))
        assert all(same(a, b) for (a, _), (b, _) in zip(evaluated, EvalBatches(Noisy(), 5), strict=True))


def test_workers_end_when_reading_does() -> None:
    before = set(multiprocessing.active_children())
    reading: Any = Batches(numbers(64), 2, 2, dataloader_kwargs={"num_workers": 2}).read([([0, 1], 0), ([0, 1], 1)])
    next(reading)
    assert len(set(multiprocessing.active_children()) - before) == 2
    reading.close()
    assert set(multiprocessing.active_children()) == before


def pad(examples: list[Any]) -> dict[str, Tensor]:
    return {"x": default_collate(examples).float() + torch.rand(())}


@pytest.mark.parametrize("dataset", [numbers(24), Noisy(), Whole(24, False), Whole(24, True)])
@pytest.mark.parametrize("kwargs", [{}, {"collate_fn": default_collate}, {"pin_memory": True}])
def test_the_global_random_state_is_left_alone(dataset: Any, kwargs: dict[str, Any]) -> None:
    before = global_states()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: pinning without an accelerator
        batches = Batches(dataset, 2, 3, dataloader_kwargs=kwargs)
        assert len(list(batches.iterate(0, 9))) == 9
        assert len(list(EvalBatches(dataset, 5, dataloader_kwargs=kwargs))) == 5
    assert before == global_states()


def test_errors_in_the_dataset_give_the_random_state_back() -> None:
    dataset = Squares(4, lambda i: 1 // 0)
    before = global_states()
    with pytest.raises(ZeroDivisionError):
        Batches(dataset, 1, 2)[0]
    assert before == global_states()


def test_pinning_keeps_the_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: (pinned.append(x), x)[1])  # type: ignore[func-returns-value]
    carried = source._Carried((torch.ones(1), {"a": Pair(torch.ones(2), torch.ones(3))})).pin_memory()
    assert isinstance(carried.batch, tuple)
    assert isinstance(carried.batch[1]["a"], Pair)
    assert len(pinned) == 3


# -------------------------------------------------------------------------------------------- kinds of batch


@pytest.mark.parametrize("collate", [None, default_collate])
@pytest.mark.parametrize(
    "make",
    [
        lambda i: torch.full((2, 3), i, dtype=torch.int16),
        lambda i: i,
        lambda i: float(i),
        lambda i: np.full(3, i, dtype=np.float32),
        lambda i: (torch.tensor(i), bool(i % 2)),
        lambda i: [torch.tensor(i), i],
        lambda i: Pair(torch.tensor(i, dtype=torch.uint8), {"z": np.int32(i)}),
        lambda i: {"x": torch.tensor([i]), "more": {"y": (i, torch.tensor(1j * i))}},
    ],
)
def test_any_nesting_and_dtype(make: Any, collate: Any) -> None:
    dataset = Squares(12, make)
    batches = Batches(dataset, 3, 2, shuffle=False, dataloader_kwargs={"collate_fn": collate})
    per_node = [default_collate([make(i) for i in (node, node + 3)]) for node in range(3)]
    got = batches[0]
    assert type(got) is type(per_node[0])
    for node in range(3):
        assert same(rows(got, [node]), tree.map_leaves(lambda x: x[None], per_node[node]))


def test_mappings_become_dicts() -> None:
    batches = Batches(Squares(4, lambda i: UserDict(x=torch.tensor(i))), 2, 2)
    assert type(batches[0]) is dict


def test_collate_fn_gets_the_examples_of_one_node() -> None:
    seen: list[Any] = []

    def collate(examples: list[Any]) -> dict[str, Any]:
        seen.append(examples)
        return {"sum": sum(y for _, y in examples), "x": torch.stack([x for x, _ in examples])}

    for dataset in [numbers(12), Squares(12), Whole(12, True), Whole(12, False)]:
        seen.clear()
        batch = Batches(dataset, 3, 2, shuffle=False, dataloader_kwargs={"collate_fn": collate})[0]
        assert [len(examples) for examples in seen] == [2, 2, 2]
        assert all(isinstance(examples, list) for examples in seen)
        assert batch["sum"].tolist() == [3, 5, 7]
        assert batch["x"].shape == (3, 2, 2)


def test_batches_do_not_share_memory_with_the_dataset() -> None:
    x = torch.arange(12.0)
    batch = Batches(x, 3, 2)[0]
    batch.zero_()
    assert x.sum() == 66


def test_device() -> None:
    batches = Batches(numbers(8), 2, 2, device="meta")
    assert [x.device.type for x in batches[0]] == ["meta", "meta"]
    there = TensorDataset(torch.ones(8, 3, device="meta"))
    assert Batches(there, 2, 2)._order(0).device.type == "meta"
    with error(ValueError, "on the device meta, where tensors have no values"):
        Batches(there, 2, 2)[0]
    with error(ValueError, r"batch\[1\] is on the device meta"):
        Batches(TensorDataset(torch.ones(8), torch.ones(8, device="meta")), 2, 2)[0]
    with error(TypeError, r"called as a factory \(rank, num_nodes, train\) -> Dataset"):
        Batches(lambda: there, 2, 2)  # type: ignore[arg-type,misc]
    batch, count = next(iter(EvalBatches(numbers(8), 4, device="meta")))
    assert (batch[0].device.type, count) == ("meta", 4)


# ------------------------------------------------------------------------------------------------- mistakes


def error(kind: type[Exception], text: str):
    return pytest.raises(kind, match=text)


def abstract() -> int:
    raise NotImplementedError("as in a class that others derive from")


def test_mistakes_are_refused_at_construction() -> None:
    with error(TypeError, "train_dataset is a Stream, an IterableDataset.*Fix: .*list"):
        Batches(Stream(), 2, 2)
    with error(TypeError, "train_dataset of node 0 is a Stream"):
        Batches(lambda rank, num_nodes, train: Stream(), 2, 2)
    for wrong in [None, 3, {"train": [1]}, "text", DataLoader(numbers(4))]:
        with error(TypeError, "not a dataset.*Allowed: .*__getitem__.*factory.*Fix"):
            Batches(wrong, 2, 2)  # type: ignore[arg-type]
    for length in ({}, {"__len__": lambda self: abstract()}):
        with error(TypeError, "train_dataset is a Endless, without length"):
            Batches(type("Endless", (), {"__getitem__": lambda self, i: i, **length})(), 2, 2)
    with error(ValueError, "^train_dataset is empty"):
        Batches([], 2, 2)
    with error(ValueError, "train_dataset of node 2 is empty"):
        Batches(lambda rank, num_nodes, train: numbers(2 - rank), 3, 1)
    with error(ValueError, "val is empty"):
        EvalBatches([], 2, name="val")


@pytest.mark.parametrize("wrong", [2.0, "2", None, True, torch.tensor(2)])
@pytest.mark.parametrize("name", ["num_nodes", "batch_size", "seed"])
def test_numbers_must_be_integers(name: str, wrong: Any) -> None:
    good: dict[str, Any] = {"num_nodes": 2, "batch_size": 2, "seed": 0}
    with error(TypeError if name == "seed" else ValueError, f"{name}=.* must be an integer"):
        Batches(torch.arange(8), **{**good, name: wrong})
    Batches(torch.arange(8), **{**good, name: np.int64(2)})


@pytest.mark.parametrize("wrong", [0, -1])
def test_numbers_must_be_positive(wrong: int) -> None:
    with error(ValueError, "batch_size=.* must be an integer >= 1"):
        Batches(torch.arange(8), 2, wrong)
    with error(ValueError, "num_nodes=.* must be an integer >= 1"):
        Batches(torch.arange(8), wrong, 2)
    with error(ValueError, "val_size=.* must be an integer >= 1"):
        EvalBatches(torch.arange(8), 2, wrong)
    with error(ValueError, "step=-1"):
        Batches(torch.arange(8), 2, 2)[-1]
    with error(ValueError, "start=-1"):
        Batches(torch.arange(8), 2, 2).iterate(-1)


@pytest.mark.filterwarnings("ignore:.*several nodes train on the same")
def test_a_batch_larger_than_a_shard_is_the_shard() -> None:
    """One dataset is dealt as DistributedSampler deals it, so that all shards are equal; a factory's may not be."""
    dealt = Batches(torch.arange(18), 4, 6, shuffle=False)
    assert (dealt.steps_per_epoch, dealt.limits, dealt.shard_sizes) == (1, None, (5, 5, 4, 4))
    assert dealt[0].tolist() == [[0, 4, 8, 12, 16], [1, 5, 9, 13, 17], [2, 6, 10, 14, 0], [3, 7, 11, 15, 1]]
    assert [dealt.width(step) for step in range(2)] == [5, 5]
    of_nodes = Batches(lambda rank, num_nodes, train: torch.arange(7 - 2 * rank), 3, 5)
    assert (of_nodes.steps_per_epoch, of_nodes.limits) == (2, (7, 5, 3))
    for step in range(6):
        width = of_nodes.width(step)
        assert of_nodes[step].shape == (3, width)
        for row, limit in zip(of_nodes[step], of_nodes.limits or ()):
            own = row[: min(limit, width)].tolist()
            assert len(set(own)) == len(own), "no example twice"
    assert [of_nodes.width(step) for step in range(4)] == [5, 2, 5, 2]
    with error(ValueError, "drop_last leaves no batch.*at most 5 examples for each of 4 nodes.*batch_size=5"):
        Batches(torch.arange(20), 4, 6, dataloader_kwargs={"drop_last": True})
    assert Batches(torch.arange(2), 4, 1).shard_sizes == (1, 1, 0, 0)


@pytest.mark.parametrize("wrong", [[], [4], [-1], [1, 1]])
def test_node_ids_must_exist(wrong: list[int]) -> None:
    with error(ValueError, "node_ids=.*Allowed: different ids from 0 to 3|node_ids=-1 must be an integer >= 0"):
        Batches(torch.arange(20), 4, 1, node_ids=wrong)
    assert Batches(torch.arange(20), 4, 1, node_ids=torch.tensor([2])).node_ids == (2,)


@pytest.mark.parametrize("key", checks._OWNED_KEYS)
def test_loader_settings_that_are_vecgyms(key: str) -> None:
    with error(ValueError, f"dataloader_kwargs has '{key}', which vecgym sets itself. Fix"):
        Batches(torch.arange(20), 4, 1, dataloader_kwargs={key: None})


def test_wrong_loader_settings() -> None:
    with error(TypeError, "dataloader_kwargs has no argument 'workers'; did you mean 'num_workers'"):
        Batches(torch.arange(20), 4, 1, dataloader_kwargs={"workers": 2})
    with error(ValueError, "prefetch_factor"):
        Batches(torch.arange(20), 4, 1, dataloader_kwargs={"prefetch_factor": 2})
    with error(ValueError, "timeout=1 needs workers"):
        EvalBatches(torch.arange(20), 4, dataloader_kwargs={"timeout": 1})
    with pytest.warns(VecgymWarning, match="worker_init_fn has no effect"):
        Batches(torch.arange(20), 4, 1, dataloader_kwargs={"worker_init_fn": print})


def test_leaves_must_become_tensors() -> None:
    texts = Squares(8, lambda i: {"x": torch.tensor(i), "text": "abc"})
    with error(TypeError, r"train_dataset: batch\['text'\] is a list of str.*Fix: .*collate_fn"):
        Batches(texts, 2, 2)[0]
    with error(TypeError, r"val_dataset: batch\['text'\] is a list of str"):
        next(iter(EvalBatches(texts, 2)))
    with error(TypeError, r"train_dataset: batch\[1\] is a NoneType"):
        Batches(Squares(8, lambda i: (i, None)), 2, 2)[0]
    with error(TypeError, r"train_dataset: batch\['x'\] is a str"):
        Batches(texts, 2, 2, dataloader_kwargs={"collate_fn": lambda examples: {"x": "abc"}})[0]


def test_ragged_shapes_are_explained() -> None:
    ragged = Squares(8, lambda i: (i, torch.zeros(i // 2 + 1)))
    with error(ValueError, r"batch\[1\] has shape \(1,\) in example 0 and \(2,\) in example 1.*Fix: pad"):
        Batches(ragged, 2, 2, shuffle=False)[0]
    longest = lambda examples: {"x": torch.zeros(len(examples), len(examples[-1][1]))}  # noqa: E731
    ragged = Squares(8, lambda i: (i, torch.zeros(i + 1)))
    with error(ValueError, r"batch\['x'\] has shape \(2, 7\) in the batch of node 2 and \(2, 8\) .* node 3"):
        Batches(ragged, 4, 2, node_ids=[2, 3], shuffle=False, dataloader_kwargs={"collate_fn": longest})[0]
    with error(ValueError, r"batch\[0\] has shape \(2, 1\) in the batch of node 0 and \(2, 2\) .* node 1"):
        Batches(lambda rank, num_nodes, train: TensorDataset(torch.zeros(4, rank + 1)), 2, 2)[0]
    with error(ValueError, r"batch does not have the same form everywhere: keys .*'x'.* and keys .*'y'"):
        Batches(Squares(8, lambda i: {"xy"[i % 2]: i}), 2, 2)[0]


def test_whole_batches_of_the_wrong_length_are_refused() -> None:
    dataset = Whole(8, True)
    dataset.__class__ = type("Wrong", (Whole,), {"__getitems__": lambda self, indices: (torch.zeros(3),)})
    with error(ValueError, r"batch\[0\] has shape \(3,\) for 4 indices"):
        Batches(dataset, 2, 2)[0]
    dataset.__class__ = type("Wrong", (Whole,), {"__getitems__": lambda self, indices: [torch.zeros(4)]})
    with error(ValueError, "returned a list of length 1 for 4 indices.*tuple"):
        Batches(dataset, 2, 2)[0]


# ----------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("make", [numbers, Squares, lambda n: Whole(n, True), lambda n: Subset(numbers(n), range(n))])
@pytest.mark.parametrize("val_size", [None, 1, 7, 8, 23, 1000])
def test_evaluation_reads_a_fixed_part(make: Any, val_size: int | None) -> None:
    batches = EvalBatches(make(23), 4, val_size, seed=5)
    size = min(val_size or 23, 23)
    order = torch.randperm(23, generator=rng.generator(5, "eval", 0))[:size]
    passes = [list(batches) for _ in range(2)]
    assert same(passes[0], passes[1])
    assert [len(y) for (_, y), _ in passes[0]] == [count for _, count in passes[0]]
    assert sum(count for _, count in passes[0]) == size == batches.num_examples
    assert len(passes[0]) == len(batches)
    assert torch.equal(torch.cat([y for (_, y), _ in passes[0]]), order)
    assert torch.equal(torch.cat([x for (x, _), _ in passes[0]]), torch.stack([order, order**2], 1))


def test_evaluation_is_read_once_if_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Squares(10)
    batches = EvalBatches(dataset, 4)
    next(iter(batches))  # a pass that stops early keeps nothing
    assert len(dataset.read) == 4
    first, second = list(batches), list(batches)
    assert len(dataset.read) == 14
    assert same(first, second)
    monkeypatch.setattr(batches_module, "CACHE_BYTES", 10 * 24 - 1)
    large = EvalBatches(dataset, 4)
    assert same(list(large), list(large))
    assert len(dataset.read) == 34


def test_evaluation_of_a_random_transform_is_the_same_at_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "CACHE_BYTES", 0)
    batches = EvalBatches(Noisy(), 5)
    assert same(list(batches), list(batches))


def test_evaluation_ignores_drop_last() -> None:
    assert EvalBatches(numbers(10), 4, dataloader_kwargs={"drop_last": True}).num_examples == 10
    assert len(list(EvalBatches(numbers(3), 4, dataloader_kwargs={"drop_last": True}))) == 1


def test_evaluation_with_a_factory_is_per_node() -> None:
    calls = []

    def factory(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        calls.append((rank, num_nodes, train))
        return TensorDataset(torch.arange(7 + rank) + 100 * rank)

    batches = EvalBatches(factory, 4, None, 3)
    assert calls == [(0, 3, False), (1, 3, False), (2, 3, False)]
    assert (batches.per_node, batches.num_examples, batches.sizes) == (True, 9, (7, 8, 9))
    assert batches.places == [None, [1, 2], [0], [2]]
    found = list(batches)
    assert [(x.shape, count) for (x,), count in found] == [((3, 4), 4), ((2, 4), 4), ((1, 3), 3), ((1, 1), 1)]
    for node in range(3):  # each has read the whole of its own
        at = [range(3) if rows is None else rows for rows in batches.places]
        own = torch.cat([x[rows.index(node)] for ((x,), _), rows in zip(found, at) if node in rows])
        assert own.sort().values.tolist() == list(range(100 * node, 100 * node + 7 + node))
    part = EvalBatches(factory, 4, None, 3, node_ids=[2])  # in a process of its own a node reads the same
    assert torch.cat([x[0] for (x,), _ in part]).tolist() == own.tolist()
    assert EvalBatches(factory, 4, 5, 3).sizes == (5, 5, 5)


# -------------------------------------------------------------------------------------------- text, tokens


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_token_windows(dtype: torch.dtype) -> None:
    tokens = torch.randint(50, (40,), generator=torch.Generator().manual_seed(0)).to(dtype)
    windows = TokenWindows(tokens, 6)
    assert len(windows) == 34
    for i in [0, 1, 33]:
        x, y = windows[i]
        assert torch.equal(x, tokens[i : i + 6].long())
        assert torch.equal(y, tokens[i + 1 : i + 7].long())
    assert same(windows[-1], windows[33])
    indices = [5, 0, 33, 5]
    x, y = windows.__getitems__(indices)
    assert x.is_contiguous()
    assert y.is_contiguous()
    assert same([x, y], default_collate([windows[i] for i in indices]))
    assert same(windows.__getitems__(torch.tensor(indices)), (x, y))
    for outside in (34, -35):
        with pytest.raises(IndexError):
            windows[outside]


def test_batches_of_token_windows() -> None:
    windows = TokenWindows(torch.arange(101), 5)
    x, y = Batches(windows, 4, 3)[7]
    assert x.shape == y.shape == (4, 3, 5)
    assert torch.equal(x + 1, y)
    listed = Batches([windows[i] for i in range(len(windows))], 4, 3)
    part = Batches(Subset(windows, range(len(windows))), 4, 3)
    padded = Batches(windows, 4, 3, dataloader_kwargs={"collate_fn": default_collate})
    for step in [0, 7, 8, 9]:
        x, y = Batches(windows, 4, 3)[step]
        assert same((x, y), listed[step])
        assert same((x, y), part[step])
        assert same((x, y), padded[step])
    (x, y), count = next(iter(EvalBatches(windows, 8)))
    assert (x.shape, count) == ((8, 5), 8)


def test_token_windows_refuse_what_is_too_short_or_not_tokens() -> None:
    with error(ValueError, "tokens has 5 tokens.*context=5.*at least context . 1 = 6.*Fix"):
        TokenWindows(torch.arange(5), 5)
    assert len(TokenWindows(torch.arange(6), 5)) == 1
    with error(ValueError, "context=0"):
        TokenWindows(torch.arange(5), 0)
    for wrong in [torch.zeros(9), torch.zeros(3, 3).long(), [1, 2, 3]]:
        with error(TypeError, "tokens is a .*Allowed: a 1-D integer tensor"):
            TokenWindows(wrong, 2)  # type: ignore[arg-type]


def test_text_round_trip() -> None:
    text = "To be, or not to be — that is the question: 😀\n"
    tokens, vocabulary = encode_text(text)
    assert tokens.dtype == torch.int64
    assert vocabulary == "".join(sorted(set(text)))
    assert decode_text(tokens, vocabulary) == text
    again, same_vocabulary = encode_text("not to", vocabulary)
    assert decode_text(again, same_vocabulary) == "not to"
    with error(ValueError, "vocabulary lacks: .'x'"):
        encode_text("x", vocabulary)
    with error(ValueError, "text is empty"):
        encode_text("")
