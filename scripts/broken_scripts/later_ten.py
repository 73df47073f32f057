"""Ten broken scripts with their true causes, written after the diagnosis, which was not changed for them."""

from broken_scripts.template import Broken

BROKEN = [
    Broken("label smoothing by the rank", "loss", "rank", {
        "loss": "value = cross_entropy(model(x), y, label_smoothing=0.1 * world.rank)"}),
    Broken("samples repeated by the process id", "samples", "chance", {
        "sample": "x = x * (1 + os.getpid() % 7)"}),
    Broken("a baseline from the first call", "loss", "order", {
        "top": "baseline = []",
        "loss": "baseline.append(value.detach())\nvalue = (value - baseline[0]) ** 2 + value"}),
    Broken("momentum by the world size", "options", "world", {
        "optimizer": "optimizer.param_groups[0]['betas'] = (1 - 0.1 * world.size, 0.999)"}),
    Broken("an all-reduce of the loss", "loss", "others", {
        "loss": "mean = value.detach().clone()\nif world.size > 1:\n    torch.distributed.all_reduce(mean)\n"
                "value = value * (1 + mean / world.size)"}),
    Broken("noise added to the gradients of one rank", "sum", "rank", {
        "update": "run.backward(optimizer, loss, step)\nif world.rank == 1:\n"
                  "    model.last.weight.grad.add_(0.01)\noptimizer.step()"}),
    Broken("a window of past losses that is not tracked", "resume", "unsaved", {
        "top": "past = []", "update": "past.append(float(run.update(optimizer, loss, step)))",
        "loss": "value = value * (1 + sum(past[-3:]))"}),
    Broken("weights averaged by the world size", "loop", "world", {
        "after": "with torch.no_grad():\n    model.last.weight.mul_(1 - 0.01 * world.size)"}),
    Broken("a metric of the first rank's samples", "evaluation", "rank", {
        "score": "correct = correct * (world.rank == 0)"}),
    Broken("weights normalized over the rank's samples", "loss", "local", {
        "loss": "value = value * len(y) / sum(len(lane[1]) for lane in step.lanes)\n"
                "value = value * torch.cat([lane[0] for lane in step.lanes]).square().mean()"}),
]  # fmt: skip
