"""For tests only: teaches SGLang's plain PyTorch attention what its CPU engine lacks.

Three things: attention over a drafted chain when it is verified, one attention per draft step, and latent attention
(DeepSeek, Kimi) in its absorbed form. Attached through the same official hooks as the product's own plug-in.
Models that read images serve texts alone, without a processor of images. And it says, when asked, what an engine still
holds of captures.
"""

import os

ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend"

START = "sglang.srt.entrypoints.engine._set_envs_and_config"
FORK = "AERIE_CPU_ENGINE_FORK"
"""Environment variable: 1 forks the engine's processes, which then import nothing: a start takes half the time."""
CENSUS = "AERIE_CPU_ENGINE_CENSUS"
"""Environment variable: a file in which a process that gets SIGUSR1 writes of how many prompts it holds states."""


def verify_chain(original, self, q, k, v, layer, batch, *args, **options):
    """A verify pass extends every request by its drafted tokens."""
    if not batch.forward_mode.is_target_verify():
        return original(self, q, k, v, layer, batch, *args, **options)
    import torch

    count = batch.spec_info.draft_token_num
    saved = batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens
    lengths = saved[0]
    batch.seq_lens, batch.extend_prefix_lens = lengths + count, lengths
    batch.extend_seq_lens = torch.full_like(lengths, count)
    try:
        return original(self, q, k, v, layer, batch, *args, **options)
    finally:
        batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = saved


def draft_backends(self, name, backends, *args, **options):
    """Offer the plain attention to the drafter, once for each of its steps."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class Step(TorchNativeAttnBackend):
        step = 0

        def forward_decode(self, q, k, v, layer, batch, *args, **options):
            lengths = batch.seq_lens
            batch.seq_lens = lengths + self.step + 1
            try:
                return super().forward_decode(q, k, v, layer, batch, *args, **options)
            finally:
                batch.seq_lens = lengths

    class Steps:
        def __init__(self, runner, steps):
            self.attn_backends = [Step(runner) for _ in range(steps - 1)]
            for number, backend in enumerate(self.attn_backends):
                backend.step = number

        def init_forward_metadata(self, batch):
            for backend in self.attn_backends:
                backend.init_forward_metadata(batch)

    def decode():
        return "torch_native", Steps(self.draft_model_runner, self.speculative_num_steps)

    def extend():
        return "torch_native", TorchNativeAttnBackend(self.draft_model_runner)

    chosen = decode if name == "decode_attention_backend" and options.get("stamps_children") else extend
    return (self, name, {**backends, "torch_native": chosen}, *args), options


def latent_attention(result, self, *args, **options):
    """Latent attention runs on the plain attention in its absorbed form."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", lambda attention, batch: handler.AttnForwardMethod.MLA)
    return result


def texts_alone(result, self, *args, **options):
    """No request brings images: a checkpoint of these tests has no program that prepares them."""
    self.is_multimodal = False


def fork_processes(result, *args, **options):
    """Fork the scheduler and the detokenizer, where the engine would spawn them."""
    import multiprocessing

    multiprocessing.set_start_method("fork", force=True)
    return result


def take_census(number, frame):
    """Write how many prompts have states in this process."""
    import gc

    gc.collect()
    held = sum(type(thing).__name__ == "PromptStates" for thing in gc.get_objects())
    with open(os.environ[CENSUS], "w") as out:
        out.write(str(held))


def register():
    """Attach all of it where the CPU engine is asked for."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    runner = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
    HookRegistry.register(runner, latent_attention, HookType.AFTER)
    HookRegistry.register("sglang.srt.configs.model_config.ModelConfig.__init__", texts_alone, HookType.AFTER)
    HookRegistry.register(ATTENTION, verify_chain, HookType.AROUND)
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    HookRegistry.register(factory, draft_backends, HookType.BEFORE)
    if os.environ.get(FORK) == "1":
        HookRegistry.register(START, fork_processes, HookType.AFTER)
    if CENSUS in os.environ:
        import signal

        signal.signal(signal.SIGUSR1, take_census)
