"""The draft tree on a CPU: build it from the draft's choices, and verify it greedily.

Node numbering, per request: 0 is the root (the last committed token), 1..D-1 are the drafted tokens in the order that
the draft selected them. `next_token[p]` is p's first child, `next_sibling[c]` the next child of the same parent, -1 for
none: the two lists walk any tree. A chain (topk = 1) is the tree where next_token = [1, 2, ..., -1].

Stand-ins for two `sgl_kernel` functions; the reference is sglang/kernels/ops/speculative/spec_tree.py (Triton).
"""

import torch
from torch import Tensor

FULL_MASK, QLEN_ONLY = 0, 1


def parents_of(parent_list: Tensor, selected_index: Tensor, topk: int) -> Tensor:
    """Parent node of every node, [B, D] int64; -1 for the root and for a node whose parent was not selected.

    selected_index [B, D-1]: index of each drafted token among all candidates, candidate c having been proposed by the
    node with table entry c // topk; entry 0 is the root, entry e > 0 stands for candidate parent_list[b, e].
    """
    entry = selected_index // topk
    if parent_list.shape[1] == 0:  # one draft step: only the root proposes
        return torch.cat([entry.new_full((entry.shape[0], 1), -1), torch.zeros_like(entry)], 1)
    candidate = parent_list.gather(1, entry.clamp_max(parent_list.shape[1] - 1))
    match = selected_index[:, None, :] == candidate[:, :, None]
    parent = torch.where(match.any(-1), match.int().argmax(-1) + 1, -1)
    parent = torch.where(entry == 0, 0, parent)
    return torch.cat([parent.new_full((parent.shape[0], 1), -1), parent], 1)


def ancestors(parent: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """(mask [B, D, D] bool: node j may see node i, i.e. i is j, the root or an ancestor of j; level [B, D] int64).

    Like the kernel, walks at most `depth` steps up.
    """
    nodes = parent.shape[1]
    mask = torch.eye(nodes, dtype=torch.bool).repeat(parent.shape[0], 1, 1)
    mask[:, :, 0] = True
    level = torch.zeros_like(parent)
    node = torch.arange(nodes).expand_as(parent)
    for _ in range(depth):
        climbing = node > 0
        level = level + climbing
        mask |= torch.nn.functional.one_hot(node.clamp_min(0), nodes).bool()
        node = torch.where(climbing, parent.gather(1, node.clamp_min(0)), node)
    return mask, level


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill the verify step's tensors, all given by the caller, from the draft's choices.

    parent_list [B, P], selected_index [B, D-1] int64 (see parents_of); verified_seq_len [B]: tokens before the root.
    Written: positions [B * D]; retrieve_index [B, D] = b * D + node; retrieve_next_token, retrieve_next_sibling [B, D],
    given filled with -1; tree_mask flat bool. QLEN_ONLY: [B, D, D]. FULL_MASK: for each request a [D, len + D] block
    whose first len columns are the caller's.

    Raises:
        ValueError: bit-packed masks, which no CPU backend reads.
    """
    batch, nodes = verified_seq_len.numel(), draft_token_num
    parent = parents_of(parent_list.reshape(batch, -1), selected_index, topk)
    mask, level = ancestors(parent, depth)
    positions.copy_((level + verified_seq_len[:, None]).flatten())
    retrieve_index.copy_(torch.arange(batch * nodes).view(batch, nodes))
    rows = torch.arange(batch)
    for node in range(nodes - 1, 0, -1):  # backwards, so that children end up in selection order
        owner = parent[:, node]
        linked = rows[owner >= 0]
        retrieve_next_sibling[linked, node] = retrieve_next_token[linked, owner[linked]]
        retrieve_next_token[linked, owner[linked]] = node
    if int(tree_mask_mode) == QLEN_ONLY:
        tree_mask.view(-1)[: mask.numel()] = mask.flatten()
    elif int(tree_mask_mode) == FULL_MASK:
        start = 0
        for b, length in enumerate(verified_seq_len.tolist()):
            block = tree_mask.view(-1)[start : start + nodes * (length + nodes)].view(nodes, length + nodes)
            block[:, length:] = mask[b]
            start += block.numel()
    else:
        raise ValueError(
            f"tree mask mode {tree_mask_mode}: the CPU stand-in builds FULL_MASK (0) and QLEN_ONLY (1) only"
        )


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree from its root along the children that equal the target's argmax.

    candidates, retrive_* [B, D]; target_predict [B, D]: the target's choice after each node. Written: predicts [B * D]
    at the visited nodes; accept_index [B, depth] flat node numbers, the rest untouched (-1); accept_token_num [B]:
    accepted drafts, the bonus token not counted. (Argument names are upstream's spelling: they are passed by keyword.)
    """
    visited: list[int] = []
    chosen: list[int] = []
    counts: list[int] = []
    paths = accept_index.tolist()
    lists = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict.view_as(candidates))
    for path, tokens, flat, first_child, sibling, target in zip(paths, *(t.tolist() for t in lists), strict=True):
        node, count = 0, 0
        path[0] = flat[0]
        while True:
            visited.append(flat[node])
            chosen.append(target[node])
            child = first_child[node]
            while child != -1 and tokens[child] != target[node]:
                child = sibling[child]
            if child == -1:
                break
            node, count = child, count + 1
            path[count] = flat[node]
        counts.append(count)
    predicts[torch.tensor(visited, dtype=torch.long)] = torch.tensor(chosen, dtype=predicts.dtype)
    accept_index.copy_(torch.tensor(paths, dtype=accept_index.dtype))
    accept_token_num.copy_(torch.tensor(counts, dtype=accept_token_num.dtype))
