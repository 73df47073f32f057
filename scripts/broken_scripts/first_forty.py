"""Forty broken scripts with their true causes, written before verify could find causes by experiment."""

from broken_scripts.template import Broken

LATE = "if step.index >= 2 and world.rank == 1:\n    "
COUNTER = "class Counter:\n    n = 0\ncounter = Counter()"

BROKEN = [
    # The kinds of earlier trials.
    Broken("world size in the forward", "loss", "world", {"forward": "x = x / world.size"}),
    Broken("mean over the local batch", "loss", "local", {
        "inputs": "x = x - torch.cat([lane[0] for lane in step.lanes]).mean(0)"}),
    Broken("BatchNorm momentum on one rank", "buffers", "rank", {
        "model": "if world.rank == 1:\n    model.norm.momentum = 0.5"}),
    Broken("a gather in the loss", "loss", "others", {
        "loss": "value = value * (1 + run.gather(value.detach()[None]).mean())"}),
    Broken("a second network's buffers", "loss", "order", {
        "before": "teacher = nn.BatchNorm1d(8)",
        "inputs": "teacher.train()(x)\nx = x + teacher.eval()(x)"}),
    Broken("a rate changed on one rank", "options", "rank", {
        "step": LATE + "optimizer.param_groups[0]['lr'] = 0.002"}),
    Broken("rank in the forward", "loss", "rank", {"forward": "x = x + 0.1 * world.rank"}),
    Broken("an unseeded torch generator", "loss", "chance", {
        "top": "own = torch.Generator()\nown.seed()",
        "inputs": "x = x + 0.1 * torch.randn(x.shape, generator=own)"}),
    Broken("data order by rank", "samples", "rank", {
        "sample": "k = (k + 7 * world.rank) % len(self.inputs)\nx, y = self.inputs[k], self.labels[k]"}),
    Broken("a temperature that is not restored", "resume", "unsaved", {
        "before": "heat = [1.0]", "loss": "value = value * heat[0]", "after": "heat[0] *= 0.9"}),
    # Thirty more.
    Broken("the clock in the loss", "loss", "chance", {"loss": "value = value * (1 + time.time() % 1)"}),
    Broken("os.urandom in an augmentation", "samples", "chance", {
        "sample": "x = x + os.urandom(1)[0] / 255"}),
    Broken("an unseeded random.Random", "loss", "chance", {
        "top": "own = random.Random()", "loss": "value = value * (1 + own.random())"}),
    Broken("an unseeded numpy generator in the samples", "samples", "chance", {
        "top": "own = numpy.random.default_rng()", "sample": "x = x + own.normal() * 0.1"}),
    Broken("the order of a set of strings", "loss", "chance", {
        "top": "ORDER = [int(name[1:]) for name in set('f0 f1 f2 f3 f4 f5 f6 f7'.split())]",
        "inputs": "x = x[:, ORDER]"}),
    Broken("a global counter in the loss", "loss", "order", {
        "top": COUNTER, "loss": "counter.n += 1\nvalue = value / counter.n"}),
    Broken("a file per rank", "samples", "rank", {
        "before": "numpy.save(f'part-{world.rank}.npy', numpy.full(8, 0.3 * world.rank))\n"
                  "train.inputs += torch.from_numpy(numpy.load(f'part-{world.rank}.npy')).float()"}),
    Broken("dropout with a generator of its own", "loss", "order", {
        "top": "own = torch.Generator().manual_seed(3)",
        "inputs": "x = x * (torch.rand(x.shape, generator=own) > 0.2)"}),
    Broken("noise seeded with the rank", "loss", "rank", {
        "inputs": "x = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(world.rank))"}),
    Broken("other weights on rank 1", "initial state", "rank", {
        "model": "if world.rank == 1:\n    nn.init.zeros_(model.last.bias)"}),
    Broken("weights from the world size", "initial state", "world", {
        "before": "torch.manual_seed(world.size)"}),
    Broken("gradients clipped by the world size", "gradients", "world", {
        "model": "model.last.weight.register_hook(lambda g: g.clamp(-0.01 / world.size, 0.01))"}),
    Broken("a gradient hook with the rank", "gradients", "rank", {
        "model": "model.first.weight.register_hook(lambda g: g * (1 + 0.1 * world.rank))"}),
    Broken("learning rate by the world size", "options", "world", {
        "optimizer": "optimizer.param_groups[0]['lr'] = 0.01 * world.size"}),
    Broken("loss divided by the world size", "loss", "world", {"loss": "value = value / world.size"}),
    Broken("optimizer state changed on one rank", "loop", "rank", {
        "after": LATE + "optimizer.state[model.last.bias]['exp_avg'].zero_()"}),
    Broken("a buffer changed on one rank", "loop", "rank", {"after": LATE + "model.norm.running_mean.zero_()"}),
    Broken("a weight changed on rank 0", "loop", "rank", {
        "after": "if step.index >= 3 and world.rank == 0 and world.size > 1:\n"
                 "    model.last.bias.data.add_(0.1)"}),
    Broken("a thread that changes a value", "loss", "chance", {
        "top": COUNTER + "\ndef work():\n    while counter.n < 10**9:\n        counter.n += 1\n"
                         "        time.sleep(0.0001)\nthreading.Thread(target=work, daemon=True).start()",
        "loss": "value = value * (1 + counter.n % 97)"}),
    Broken("a variable of the environment", "loss", "rank", {
        "forward": "x = x * (1 + int(os.environ.get('RANK', 0)))"}),
    Broken("a metric divided by the world size", "evaluation", "world", {"score": "correct = correct / world.size"}),
    Broken("a metric with the rank", "evaluation", "rank", {"score": "correct = correct + 0.1 * world.rank"}),
    Broken("an EMA that is not tracked", "resume", "unsaved", {
        "model": "ema = [value.detach().clone() for value in model.parameters()]",
        "after": "torch._foreach_lerp_(ema, [v.detach() for v in model.parameters()], 0.1)",
        "score": "correct = correct * ema[0].mean()"}),
    Broken("a scheduler that is not tracked", "resume", "unsaved", {
        "optimizer": "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.8**n)\n"
                     "run.untracked(scheduler)",
        "after": "scheduler.step()"}),
    Broken("a curriculum that is not tracked", "resume", "unsaved", {
        "before": "level = [0]", "after": "level[0] += 1", "inputs": "x = x[:, :] * (1 + level[0] / 10)"}),
    Broken("steps by the world size", "steps", "world", {"steps": "steps=10 // world.size"}),
    Broken("lanes by the world size", "lanes", "world", {
        "config": "lanes = dataclasses.replace(config.batch, lanes=int(os.environ['WORLD_SIZE']))\n"
                  "config = dataclasses.replace(config, batch=lanes)"}),
    Broken("gradients divided before the step", "sum", "world", {
        "update": "run.backward(optimizer, loss, step)\n"
                  "for value in model.parameters():\n    value.grad.div_(world.size)\noptimizer.step()"}),
    Broken("gradients that nobody sums", "sum", "rank", {
        "update": "optimizer.zero_grad()\nfor lane in step.lanes:\n    loss(lane).backward()\noptimizer.step()"}),
    Broken("a buffer scaled by the world size", "loop", "world", {"after": "model.scale.mul_(1 + 0.1 * world.size)"}),
]  # fmt: skip
