"""How attention's heads are split over the axes `tensor` and `context`, and which splits are refused."""

from jtrain.errors import UserError
from jtrain.layout.dims import ParamInfo, kv_heads_in_use, splits_heads
from jtrain.layout.mesh import MeshSpec


def devices_per_key_head(mesh: MeshSpec, infos: tuple[ParamInfo, ...]) -> int:
    """Returns the number of devices along `tensor` that compute the same key head.

    Raises:
      UserError: a device would have a part of a head, or query heads that do not all belong to its key heads.
    """
    size = {letter: n for info in infos for letter, n in zip(info.dims, info.shape, strict=True)}
    # Parameters without attention heads, as in tests of a layout alone.
    if "N" not in size:
        return 1
    # Without K each head has keys of its own, as in latent attention.
    heads, kv_heads, tensor = size["N"], size.get("K", size["N"]), mesh.tensor
    if not splits_heads(heads, kv_heads, tensor):
        valid_tensor_sizes = [str(n) for n in range(1, heads + 1) if splits_heads(heads, kv_heads, n)]
        raise UserError(
            f"mesh.tensor={tensor} cannot split model.num_heads={heads} with model.num_kv_heads={kv_heads}: "
            "it must divide the query heads, and divide or be a multiple of the key heads. Set mesh.tensor "
            f"to one of {', '.join(valid_tensor_sizes)}, or change the heads."
        )
    # 8 devices along `tensor` and 2 key heads: 4 devices compute the same head.
    return max(1, tensor // kv_heads)


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
    size = {letter: n for info in infos for letter, n in zip(info.dims, info.shape, strict=True)}
    # Recurrent mixers pass states on, whatever the number of their heads.
    if not {"N", "K"} <= set(size):
        return
    # Heads of one device along `tensor`: ulysses splits them once more, over `context`.
    size.setdefault("K", size["N"])
    heads, kv_heads = (n // mesh.tensor for n in (size["N"], kv_heads_in_use(size["K"], mesh.tensor)))
    if heads % mesh.context or (kv_heads % mesh.context and mesh.context % kv_heads):
        suffix = f" / mesh.tensor={mesh.tensor}" if mesh.tensor > 1 else ""
        raise UserError(
            f"layout.context_attention=ulysses gives each of mesh.context={mesh.context} devices a part of "
            f"the heads, but model.num_heads={size['N']}{suffix} is {heads}, and "
            f"model.num_kv_heads={size['K']}{suffix} is {kv_heads}. mesh.context must divide the former, and "
            "divide or be a multiple of the latter: change it, or set layout.context_attention=ring."
        )
