"""Draft trees, one kernel per operation: ops.trees defines each. One program per sequence, except for the scores.

All numbers of a tree fit a few registers, so ranks are counted instead of sorted: a node's rank is the number of nodes
before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ...types import MAX_DRAFT, AttnSpec, DraftNoise, KVView
from ..trees import BRANCH, WIDTH, Frontier, Nodes, TreeRows
from .choose import gumbel
from .common import Launcher, pdl_start

CHUNK = 2048  # columns of scores a program


@triton.jit(do_not_specialize_on_alignment=["seed", "position", "sampled", "temperature"])
def best_kernel(
    logits, ids, seed, position, temperature, sampled, best, where, mass, n, chunks,
    WIDTH: tl.constexpr, BRANCH: tl.constexpr, NOISE: tl.constexpr, IDS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The BRANCH best columns of each chunk of logits [R, n] (NOISE: divided by the temperature, with noise), and the
    sum of all its powers relative to the very best -> best float32 and where int32 [R, chunks, BRANCH], mass float32
    [R, chunks].

    Grid (R, chunks): a program per CHUNK columns of a row; a sequence has WIDTH rows.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    ok = i < n
    pdl_start(PDL)
    z = tl.load(logits + row * n + i, mask=ok, other=float("-inf"))
    if NOISE:  # noqa: SIM102
        if tl.load(sampled + row // WIDTH) != 0:
            token = i.to(tl.int64)
            if IDS:
                token = tl.load(ids + row * n + i, mask=ok, other=0)
            z = z / tl.load(temperature + row // WIDTH) + gumbel(
                token, tl.load(seed + row // WIDTH), tl.load(position + row // WIDTH)
            )
    z = tl.where(ok & (z == z), z, float("-inf"))
    most = tl.max(z, 0)
    tl.store(mass + row * chunks + chunk, tl.sum(tl.where(z > float("-inf"), tl.exp(z - most), 0.0), 0))
    to = (row * chunks + chunk) * BRANCH
    for rank in tl.static_range(BRANCH):
        top, at = tl.max(z, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best + to + rank, top)
        tl.store(where + to + rank, chunk * CHUNK + at)
        z = tl.where(i == chunk * CHUNK + at, float("-inf"), z)


@triton.jit
def _before(a, i):
    """[N, N]: whether the second comes before the first: it has a larger chance, or the same and a lower number."""
    return ((a[None, :] > a[:, None]) | ((a[None, :] == a[:, None]) & (i[None, :] < i[:, None]))).to(tl.int32)


@triton.jit
def branch_kernel(
    ids, best, where, mass, of_node, of_chance, of_line, tokens, parents, chance, chain, to_tokens, to_before, to_node,
    to_chance, to_line,
    n, chunks, found, first,
    WIDTH: tl.constexpr, BRANCH: tl.constexpr, IDS: tl.constexpr, SPACE: tl.constexpr, PDL: tl.constexpr,
):
    """The children of the WIDTH rows of a sequence, written to the nodes from `first` on, and the WIDTH likeliest of
    all of them, the rows of the next level (to_*). best, where and mass: as `best_kernel` writes them.

    Grid (B,): a program per sequence.
    """
    b = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, WIDTH)
    c = tl.arange(0, SPACE)
    r = tl.arange(0, BRANCH)
    i = tl.arange(0, WIDTH * BRANCH)
    pdl_start(PDL)
    row = b * WIDTH + w
    ok = (c < BRANCH * chunks)[None, :] & (w >= 0)[:, None]
    # [W, chunks of BRANCH]
    z = tl.load(best + row[:, None] * (BRANCH * chunks) + c[None, :], mask=ok, other=float("-inf"))
    sums = tl.load(mass + row[:, None] * chunks + c[None, :] // BRANCH, mask=ok & (c % BRANCH == 0)[None, :], other=0.0)
    most = tl.max(z, 1)
    most = tl.where(most == float("-inf"), 0.0, most)  # nothing was scored: no child has a chance
    total = tl.sum(tl.where(z > float("-inf"), sums * tl.exp(z - most[:, None]), 0.0), 1)
    values = tl.zeros((WIDTH, BRANCH), dtype=tl.float32)
    columns = tl.zeros((WIDTH, BRANCH), dtype=tl.int32)
    for rank in tl.static_range(BRANCH):
        top, at = tl.max(z, 1, return_indices=True, return_indices_tie_break_left=True)
        values = tl.where(r[None, :] == rank, top[:, None], values)
        columns = tl.where(r[None, :] == rank, at[:, None], columns)
        z = tl.where(c[None, :] == at[:, None], float("-inf"), z)
    share = tl.load(of_chance + row) / tl.maximum(total, 1.0)
    likely = tl.reshape(
        tl.where(values > float("-inf"), share[:, None] * tl.exp(values - most[:, None]), 0.0), (WIDTH * BRANCH,)
    )
    of = b * WIDTH + i // BRANCH
    column = tl.load(where + of * (BRANCH * chunks) + tl.reshape(columns, (WIDTH * BRANCH,)))
    token = tl.minimum(column, n - 1).to(tl.int64)
    if IDS:
        token = tl.load(ids + of * n + token)
    on_line = tl.where(i % BRANCH == 0, tl.load(of_line + of), 0)
    to = b * found + first + i
    tl.store(tokens + to, token)
    tl.store(parents + to, tl.load(of_node + of))
    tl.store(chance + to, likely)
    tl.store(chain + to, on_line)
    place = tl.sum(_before(likely, i), 1)
    on = b * WIDTH + place
    goes = place < WIDTH
    tl.store(to_tokens + on, token, mask=goes)
    tl.store(to_before + on, of, mask=goes)
    tl.store(to_node + on, (first + i).to(tl.int64), mask=goes)
    tl.store(to_chance + on, likely, mask=goes)
    tl.store(to_line + on, on_line, mask=goes)


def branch(
    ops: Launcher, logits: Tensor, ids: Tensor | None, noise: DraftNoise | None, front: Frontier, nodes: Nodes,
    level: int,
) -> Frontier:
    rows, n = logits.shape
    chunks = triton.cdiv(n, CHUNK)
    best, where = (logits.new_empty((rows, chunks, BRANCH), dtype=kind) for kind in (torch.float32, torch.int32))
    mass = logits.new_empty((rows, chunks), dtype=torch.float32)
    named = logits if ids is None else ids.contiguous()
    logits = logits.contiguous()
    drawn = (mass,) * 4
    if noise is not None:
        drawn = (noise.seed, noise.position, noise.temperature, noise.sampled.view(torch.uint8))
    same = dict(WIDTH=WIDTH, BRANCH=BRANCH, IDS=ids is not None, PDL=ops.pdl, launch_pdl=ops.pdl)
    best_kernel[(rows, chunks)](
        logits, named, *drawn, best, where, mass, n, chunks, NOISE=noise is not None, CHUNK=CHUNK, num_warps=4, **same
    )
    nxt = Frontier(*(torch.empty_like(t) for t in (front.tokens, front.before, front.node, front.chance, front.chain)))
    branch_kernel[(rows // WIDTH,)](
        named, best, where, mass, front.node, front.chance, front.chain, nodes.tokens, nodes.parents, nodes.chance,
        nodes.chain, nxt.tokens, nxt.before, nxt.node, nxt.chance, nxt.chain, n, chunks, nodes.tokens.shape[1],
        level * WIDTH * BRANCH, SPACE=triton.next_power_of_2(BRANCH * chunks), num_warps=1, **same,
    )
    return nxt


@triton.jit(do_not_specialize_on_alignment=["scores", "ids"])
def comb_kernel(
    scores, ids, tokens, parents, chance, chain, parts, of_batch, of_level,
    DEPTH: tl.constexpr, BRANCH: tl.constexpr, SPACE: tl.constexpr, PDL: tl.constexpr,
):
    """The best of each step's scores and its rivals, level by level; the best one is what the next level follows:
    scores, ids [B, DEPTH, parts] -> tokens, parents, chance, chain [B, DEPTH · BRANCH].

    Grid (B,): a program per sequence.
    """
    b = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, SPACE)
    pdl_start(PDL)
    reach = tl.full((), 1.0, tl.float32)
    for level in tl.static_range(DEPTH):
        at = b * of_batch + level * of_level
        z = tl.load(scores + at + c, mask=c < parts, other=float("-inf"))
        z = tl.where(z == z, z, float("-inf"))
        most = tl.max(z, 0)
        most = tl.where(most == float("-inf"), 0.0, most)
        total = tl.sum(tl.where(z > float("-inf"), tl.exp(z - most), 0.0), 0)
        share = reach / tl.maximum(total, 1.0)
        for rank in tl.static_range(BRANCH):
            top, part = tl.max(z, 0, return_indices=True, return_indices_tie_break_left=True)
            likely = tl.where(top > float("-inf"), share * tl.exp(top - most), 0.0)
            to = b * (DEPTH * BRANCH) + level * BRANCH + rank
            tl.store(tokens + to, tl.load(ids + at + tl.minimum(part, parts - 1)).to(tl.int64))
            tl.store(parents + to, b * 0 + ((level - 1) * BRANCH if level > 0 else -1))
            tl.store(chance + to, likely)
            tl.store(chain + to, 1 if rank == 0 else 0)
            if rank == 0:
                reach = likely
            z = tl.where(c == part, float("-inf"), z)


def chain_with_runner_ups(ops: Launcher, scores: Tensor, ids: Tensor) -> Nodes:
    batch, depth, parts = scores.shape
    assert scores.stride(2) == 1 and scores.stride() == ids.stride()
    nodes = Nodes.of(batch, depth, scores.device, 1)
    comb_kernel[(batch,)](
        scores, ids, nodes.tokens, nodes.parents, nodes.chance, nodes.chain, parts, scores.stride(0), scores.stride(1),
        DEPTH=depth, BRANCH=BRANCH, SPACE=triton.next_power_of_2(parts), PDL=ops.pdl, num_warps=4, launch_pdl=ops.pdl,
    )
    return nodes


@triton.jit
def plant_kernel(
    tokens, parents, chance, chain, to_tokens, to_depth, to_paths, to_above,
    FOUND: tl.constexpr, SPACE: tl.constexpr, COUNT: tl.constexpr, EACH: tl.constexpr, DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The COUNT likeliest of FOUND nodes, EACH per level, in their order, and the path of each: tokens, parents,
    chance, chain [B, FOUND] -> to_tokens [B, COUNT]; to_depth, to_above [B · (COUNT + 1)], to_paths [B · (COUNT + 1),
    DEPTH + 1], with the newest token's row. The next kernels may not start before this one ends: attention reads paths
    before it waits.

    Grid (B,): a program per sequence.
    """
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SPACE)
    real = i < FOUND
    at = b * FOUND + i
    if PDL:
        gdc_wait()
    likely = tl.load(chance + at, mask=real, other=-1.0)
    selected = real & (tl.sum(_before(likely, i), 1) < COUNT)
    order = tl.where(tl.load(chain + at, mask=real, other=0) > 0, i, i + SPACE)
    # of the row, where it is kept
    number = 1 + tl.sum(((order[None, :] < order[:, None]) & selected[None, :]).to(tl.int32), 1)
    tl.store(to_tokens + b * COUNT + number - 1, tl.load(tokens + at, mask=real, other=0), mask=selected)
    first = b * (COUNT + 1)
    depth = i // EACH + 1
    row = first + number
    tl.store(to_depth + row, depth.to(tl.int64), mask=selected)
    ancestor = i.to(tl.int64)
    node = number
    for up in tl.static_range(DEPTH):
        tl.store(to_paths + row * (DEPTH + 1) + depth - up, node, mask=selected & (depth > up))
        tl.store(to_paths + row * (DEPTH + 1) + depth + 1 + up, number, mask=selected & (depth + up < DEPTH))
        ancestor = tl.load(parents + b * FOUND + ancestor, mask=real & (ancestor >= 0), other=-1)
        node = tl.sum(tl.where(ancestor[:, None] == i[None, :], number[None, :], 0), 1)
        if up == 0:
            tl.store(to_above + row, first + node, mask=selected)
    tl.store(to_paths + row * (DEPTH + 1), number * 0, mask=selected)
    root = tl.arange(0, 32)  # the newest token: DEPTH is at most 16
    tl.store(to_paths + first * (DEPTH + 1) + root, root * 0, mask=root <= DEPTH)
    tl.store(to_depth + first, first * 0)
    tl.store(to_above + first, first * 0 - 1)


def build_fixed_tree(ops: Launcher, nodes: Nodes, count: int, depth: int) -> TreeRows:
    # int64
    batch, num_candidates = nodes.tokens.shape
    empty = nodes.tokens.new_empty
    rows = batch * (count + 1)
    tree = TreeRows(
        empty((batch, count)), empty(rows), empty((rows, depth + 1), dtype=torch.int32), parent_rows=empty(rows)
    )
    plant_kernel[(batch,)](
        nodes.tokens, nodes.parents, nodes.chance, nodes.chain, tree.tokens, tree.depth, tree.ancestors,
        tree.parent_rows, FOUND=num_candidates, SPACE=triton.next_power_of_2(num_candidates), COUNT=count,
        EACH=num_candidates // depth,
        DEPTH=depth, PDL=ops.pdl, num_warps=8, launch_pdl=ops.pdl,
    )
    return tree


@triton.jit(do_not_specialize_on_alignment=["start_of", "limit"])
def walk_kernel(
    chosen, ids, above, start_of, limit, to_accepted, to_tokens, to_rows,
    SPACE: tl.constexpr, DEPTH: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):
    """Follows the target's choices down each tree: chosen, ids, above by row, the rows of sequence b from start_of[b]
    on -> to_accepted [B]; to_tokens and to_rows [B, DEPTH + 1], the chosen token at each step and the row it was chosen
    in. LIMIT: no more than limit [B] drafts are accepted.

    Grid (B,): a program per sequence.
    """
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SPACE)
    pdl_start(PDL)
    first = tl.load(start_of + b).to(tl.int64)
    end = tl.load(start_of + b + 1).to(tl.int64)
    row = first + i
    in_tree = row < end
    parent = tl.load(above + row, mask=in_tree, other=-2)
    token = tl.load(ids + row, mask=in_tree, other=-1)
    at = first
    accepted = first * 0
    going = first >= 0
    choice = tl.load(chosen + at)
    to = b * (DEPTH + 1)
    tl.store(to_tokens + to, choice)
    tl.store(to_rows + to, first * 0)
    for depth in tl.static_range(DEPTH):
        child = tl.min(tl.where(in_tree & (parent == at) & (token == choice), row, end), 0)
        going = going & (child < end)
        if LIMIT:
            going = going & (tl.load(limit + b) > depth)
        at = tl.where(going, child, at)
        accepted += going.to(tl.int64)
        choice = tl.load(chosen + at)
        tl.store(to_tokens + to + 1 + depth, choice)
        tl.store(to_rows + to + 1 + depth, at - first)
    tl.store(to_accepted + b, accepted)


def accept_path(
    ops: Launcher, chosen: Tensor, ids: Tensor, tree: TreeRows, start: Tensor, limit: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    batch = start.shape[0] - 1
    deepest = tree.deepest
    accepted = chosen.new_empty(batch, dtype=torch.int64)
    tokens, path = (chosen.new_empty((batch, deepest + 1), dtype=torch.int64) for _ in range(2))
    walk_kernel[(batch,)](
        chosen, ids, tree.parent_rows, start, start if limit is None else limit, accepted, tokens, path,
        SPACE=triton.next_power_of_2(MAX_DRAFT + 1), DEPTH=deepest, LIMIT=limit is not None, PDL=ops.pdl, num_warps=1,
        launch_pdl=ops.pdl,
    )
    return accepted, tokens, path


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table", "length", "accepted", "rows"])
def keep_path_kernel(
    caches, table, rows, accepted, length, table_stride, page_stride, like,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, TREE_DEPTH: tl.constexpr, SPACE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Moves the K/V of an accepted path to the positions after the committed length [B]: rows [B, TREE_DEPTH] of the
    tree, of which accepted [B] and the first are kept; caches: addresses of tensors [pages, heads, PAGE, D]. Everything
    is read before anything is written.

    Grid (caches, heads, B): a program per head of the keys or values of one layer of a sequence.
    """
    cache = tl.program_id(0)
    head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    depth = tl.arange(0, SPACE)
    d = tl.arange(0, DP)
    pdl_start(PDL)
    base = tl.load(length + b)
    num_accepted = tl.load(accepted + b)
    source = tl.load(rows + b * TREE_DEPTH + depth, mask=depth < TREE_DEPTH, other=0)
    moves = (depth < TREE_DEPTH) & (depth <= num_accepted) & (source != depth)
    if tl.sum(moves.to(tl.int32), 0) > 0:
        to = tl.load(caches + cache).to(tl.pointer_type(like.dtype.element_ty))
        pages = table + b * table_stride
        old = base + source
        new = base + depth
        page = tl.load(pages + old // PAGE, mask=moves, other=0).to(tl.int64)
        old = page * page_stride + (head * PAGE + old % PAGE) * D
        page = tl.load(pages + new // PAGE, mask=moves, other=0).to(tl.int64)
        new = page * page_stride + (head * PAGE + new % PAGE) * D
        ok = moves[:, None] & (d < D)[None, :]
        x = tl.load(to + old[:, None] + d[None, :], mask=ok, other=0.0)
        tl.debug_barrier()
        tl.store(to + new[:, None] + d[None, :], x, mask=ok)


@cache
def on_device(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """int64. Made once: it cannot be made during capture, and graphs read it."""
    return torch.tensor(addresses, dtype=torch.int64).to(device)


def compact_kv(
    ops: Launcher, rows: Tensor, accepted: Tensor, length: Tensor, specs: Sequence[AttnSpec], kv: KVView
) -> None:
    """One launch for all layers of one shape."""
    kinds: dict[tuple[str, int, int], list[Tensor]] = {}
    for spec in specs:
        keys = kv.keys[spec.kv_layer]
        values = kv.values[spec.kv_layer]
        assert keys is not None and values is not None
        kinds.setdefault((spec.group, spec.kv_heads, spec.head_dim), []).extend((keys, values))
    for (group, kv_heads, dim), caches in kinds.items():
        table = kv.tables["full" if group == "full" else "sliding"]
        pointers = on_device(tuple(cache.data_ptr() for cache in caches), rows.device)
        keep_path_kernel[(len(caches), kv_heads, rows.shape[0])](
            pointers, table, rows, accepted, length, table.stride(0), caches[0].stride(0), caches[0],
            D=dim, DP=triton.next_power_of_2(dim), PAGE=kv.page_size, TREE_DEPTH=rows.shape[1],
            SPACE=triton.next_power_of_2(rows.shape[1]), PDL=ops.pdl, num_warps=4, launch_pdl=ops.pdl,
        )
