"""For tests only: the few kernels that SGLang's CPU engine calls to draft and verify one chain, in plain PyTorch.

SGLang's kernel package is compiled for GPUs and exists for no CPU. Capture calls nothing of it, importing its names is all
that the engine asks for; chains call the seven functions below. Whatever else is called says so. Since no operator
`convert_weight_packed` is registered, every layer of the engine takes its plain PyTorch path.

Shapes: B requests, n drafted tokens of one (the root included).
"""

import ctypes

import torch

__version__ = "0.0.0+cpu"


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt, src):
    """Move cache rows `src` to `tgt` in every layer's buffer."""
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * stride, stride) for row in src.tolist()]
        for target, row in zip(tgt.tolist(), rows, strict=True):
            ctypes.memmove(address + target * stride, row, stride)


def assign_req_to_token_pool_cpu(pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Write each request's new cache slots into its row of the token pool."""
    taken = 0
    for row, first, stop in zip(pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:stop] = out_cache_loc[taken : taken + stop - first].to(req_to_token.dtype)
        taken += stop - first


def assign_extend_cache_locs_cpu(pool_indices, req_to_token, start, end, out, pool_len):
    """Read each request's cache slots of [start, end) from the token pool, one after the other."""
    taken = 0
    for row, first, stop in zip(pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out[taken : taken + stop - first] = req_to_token[row, first:stop].to(out.dtype)
        taken += stop - first


def assign_draft_cache_locs_contiguous_cpu(pool_indices, req_to_token, seq_lens, out, pool_len, topk, num_steps):
    """Read the slots behind each request's tokens, where its drafted tokens go."""
    count = topk * num_steps
    for i, (row, length) in enumerate(zip(pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        out.view(-1)[i * count : (i + 1) * count] = req_to_token[row, length : length + count].to(out.dtype)


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus, stride):
    """The last accepted token of each request."""
    index = torch.arange(accept_lens.numel())
    bonus.copy_(accept_tokens.view(-1)[index * stride + accept_lens.long() - 1].to(bonus.dtype))


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out):
    """Cache slots of the accepted tokens."""
    index = accept_index.view(-1)
    chosen = index[index != -1].long()
    accept_out[: chosen.numel()] = out_cache_loc[chosen]


def build_tree_kernel_efficient_cpu(
    parents, selected, seq_lens, tree_mask, positions, index, following, sibling, topk, depth, count, mode
):
    """The tree of drafted tokens where every tree is a chain."""
    if topk != 1:
        raise NotImplementedError("this stand-in drafts chains only (topk 1)")
    requests, place = seq_lens.numel(), torch.arange(count)
    positions.view(requests, count).copy_(seq_lens.view(-1, 1) + place)
    index.view(requests, count).copy_(torch.arange(requests * count).view(requests, count))
    following.view(requests, count).copy_(torch.where(place < count - 1, place + 1, -1).expand(requests, count))
    sibling.fill_(-1)
    if tree_mask is not None and tree_mask.numel() == requests * count * count:
        lower = torch.tril(torch.ones(count, count, dtype=torch.bool))
        tree_mask.view(requests, count, count).copy_(lower.expand(requests, count, count))


def verify_tree_greedy_cpu(
    *, predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """Accept drafted tokens as long as each is the verifier's own greedy choice."""
    requests, count = candidates.shape
    wanted = target_predict.reshape(requests, count)
    for b in range(requests):
        at, accepted = 0, 0
        accept_index[b, 0] = retrive_index[b, 0]
        while True:
            predicts[retrive_index[b, at]] = wanted[b, at].to(predicts.dtype)
            child = int(retrive_next_token[b, at])
            while child != -1 and int(candidates[b, child]) != int(wanted[b, at]):
                child = int(retrive_next_sibling[b, child])
            if child == -1 or accepted + 1 >= accept_index.shape[1]:
                break
            accepted += 1
            accept_index[b, accepted] = retrive_index[b, child]
            at = child
        accept_token_num[b] = accepted


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **options):
        raise NotImplementedError(f"the CPU stand-in for SGLang's kernels has no {name}")

    return missing
