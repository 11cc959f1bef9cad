"""How attention's heads are split over the axes `tensor` and `context`, and which splits are refused."""

from jtrain.errors import UserError
from jtrain.layout.dims import ParamInfo, kv_heads_in_use, splits_heads
from jtrain.layout.mesh import MeshSpec


def devices_per_key_head(mesh: MeshSpec, infos: tuple[ParamInfo, ...]) -> dict[str, int]:
    """Returns the number of devices along `tensor` that compute the same key head, by the layer's path.

    Raises:
      UserError: a device would have a part of a head, or query heads that do not all belong to its key heads.
    """
    shared_by: dict[str, int] = {}
    tensor = mesh.tensor
    for path, (heads, kv_heads) in _heads_by_layer(infos).items():
        if not splits_heads(heads, kv_heads, tensor):
            valid_tensor_sizes = [str(n) for n in range(1, heads + 1) if splits_heads(heads, kv_heads, n)]
            raise UserError(
                f"mesh.tensor={tensor} cannot split model.num_heads={heads} with "
                f"model.num_kv_heads={kv_heads}: "
                "it must divide the query heads, and divide or be a multiple of the key heads. Set "
                f"mesh.tensor to one of {', '.join(valid_tensor_sizes)}, or change the heads."
            )
        # 8 devices along `tensor` and 2 key heads: 4 devices compute the same head.
        shared_by[path] = max(1, tensor // kv_heads)
    return shared_by


def _heads_by_layer(infos: tuple[ParamInfo, ...]) -> dict[str, tuple[int, int]]:
    """Query heads and key heads of each layer of attention, by its path; blocks may differ."""
    sizes: dict[str, dict[str, int]] = {}
    for info in infos:
        if info.is_adapter:
            continue  # split as the matrix beside it
        sizes.setdefault(info.path.rpartition(".")[0], {}).update(zip(info.dims, info.shape, strict=True))
    # Without K each head has keys of its own, as in latent attention. Norms of heads have no D.
    return {
        path: (size["N"], size.get("K", size["N"])) for path, size in sizes.items() if {"N", "D"} <= set(size)
    }


def check_context_heads(mesh: MeshSpec, infos: tuple[ParamInfo, ...], *, attention: str, order: str) -> None:
    """Refuses attention over `context` that is impossible or unbalanced.

    Raises:
      UserError: ring attention without zig-zag order, or heads that `ulysses` cannot split.
    """
    if mesh.context == 1:
        return
    if attention == "ring":
        # Zig-zag: device i of n has parts i and 2n - 1 - i of a row, early and late, so all have equal work.
        if order != "zigzag":
            raise UserError(
                f"layout.context_attention=ring with data.context_order={order}: under a causal mask the "
                f"last of mesh.context={mesh.context} devices would have the most work, and the others would "
                "wait. Set data.context_order=zigzag, or layout.context_attention=ulysses."
            )
        return
    for all_heads, all_kv_heads in _heads_by_layer(infos).values():
        # Heads of one device along `tensor`: ulysses splits them once more, over `context`.
        heads, kv_heads = (n // mesh.tensor for n in (all_heads, kv_heads_in_use(all_kv_heads, mesh.tensor)))
        if heads % mesh.context or (kv_heads % mesh.context and mesh.context % kv_heads):
            suffix = f" / mesh.tensor={mesh.tensor}" if mesh.tensor > 1 else ""
            raise UserError(
                f"layout.context_attention=ulysses gives each of mesh.context={mesh.context} devices a part "
                f"of the heads, but model.num_heads={all_heads}{suffix} is {heads}, and "
                f"model.num_kv_heads={all_kv_heads}{suffix} is {kv_heads}. mesh.context must divide the "
                "former, and "
                "divide or be a multiple of the latter: change it, or set layout.context_attention=ring."
            )
