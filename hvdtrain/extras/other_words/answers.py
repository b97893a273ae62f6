"""Keys and values of other tools, with the equivalent here, for the message about an unknown key or
value. None of them is accepted."""

from __future__ import annotations

# word, in lower case and with _ -> the key, or key=value
KEYS = {
    # learning rate and optimizer
    **dict.fromkeys(
        ("lr", "learning_rate", "learningrate", "init_lr", "initial_lr", "max_lr", "peak_lr"),
        "optim.base_lr",
    ),
    **dict.fromkeys(("optim", "optimizer", "optimiser", "opt", "solver"), "optim.name"),
    **dict.fromkeys(("wd", "decay", "l2"), "optim.weight_decay"),
    **dict.fromkeys(("beta1", "mom"), "optim.momentum"),
    "nesterov": "optim.nesterov=true",
    **dict.fromkeys(
        (
            "grad_clip",
            "clip_grad",
            "clip_grad_norm",
            "max_grad_norm",
            "gradient_clip_val",
            "gradient_clipping",
        ),
        "optim.clip_norm",
    ),
    # recipe
    **dict.fromkeys(
        ("recipe", "scheduler", "sched", "lr_scheduler", "lr_schedule", "lr_policy"),
        "recipe.schedule",
    ),
    **dict.fromkeys(("lr_steps", "decay_epochs", "decay_milestones"), "recipe.milestones"),
    **dict.fromkeys(("lr_gamma", "lr_decay", "decay_rate"), "recipe.gamma"),
    **dict.fromkeys(("min_lr", "eta_min", "final_lr"), "recipe.end_lr"),
    **dict.fromkeys(("num_warmup_steps", "warmup_iters"), "recipe.warmup"),
    **dict.fromkeys(("lr_warmup", "lr_warmup_epochs"), "recipe.warmup"),
    # length of the job
    **dict.fromkeys(
        ("num_epochs", "n_epochs", "max_epochs", "num_train_epochs", "train_epochs"), "epochs"
    ),
    **dict.fromkeys(
        (
            "steps",
            "num_steps",
            "train_steps",
            "total_steps",
            "iterations",
            "iters",
            "max_iter",
            "max_iters",
        ),
        "stop.steps",
    ),
    **dict.fromkeys(("stop", "target_acc", "target_accuracy", "target_loss"), "stop.target"),
    **dict.fromkeys(
        (
            "early_stopping",
            "early_stopping_patience",
            "early_stop_patience",
            "early_stopping_rounds",
        ),
        "stop.patience",
    ),
    **dict.fromkeys(
        ("restore_best_weights", "restore_best", "load_best_model_at_end"), "stop.restore_best"
    ),
    **dict.fromkeys(("early_stopping_threshold", "min_delta"), "stop.min_delta"),
    **dict.fromkeys(("guard", "time_limit", "walltime", "max_hours"), "guard.max_time"),
    **dict.fromkeys(("random_seed", "manual_seed"), "seed"),
    # batch
    **dict.fromkeys(
        ("batch", "bs", "batchsize", "batch_size", "train_batch_size", "global_batch_size"),
        "batch.size",
    ),
    **dict.fromkeys(
        (
            "local_batch_size",
            "per_device_batch_size",
            "per_device_train_batch_size",
            "batch_size_per_gpu",
        ),
        "batch.per_rank",
    ),
    **dict.fromkeys(
        ("test_batch_size", "val_batch_size", "eval_batch_size", "per_device_eval_batch_size"),
        "batch.evaluate",
    ),
    **dict.fromkeys(
        ("accumulate_grad_batches", "gradient_accumulation_steps", "accumulation_steps"),
        "batch.micro",
    ),
    **dict.fromkeys(
        ("micro_batch_size", "batches_per_allreduce", "backward_passes_per_step"), "batch.micro"
    ),
    "train_micro_batch_size_per_gpu": "batch.micro",
    # data
    **dict.fromkeys(("data", "dataset"), "data.name"),
    **dict.fromkeys(
        ("data_dir", "datadir", "data_path", "data_root", "dataset_path", "train_dir"), "data.root"
    ),
    "num_readers": "data.readers",
    "packing": "data.pack",
    **dict.fromkeys(("num_workers", "n_workers", "loader_workers"), "data.workers"),
    **dict.fromkeys(("prefetch", "prefetch_factor"), "data.ahead"),
    "random_crop": "augment.crop",
    **dict.fromkeys(("hflip", "random_flip", "horizontal_flip"), "augment.flip"),
    **dict.fromkeys(("padding_mode", "pad_mode"), "augment.pad"),
    "mixup_alpha": "augment.mixup",
    "cutmix_alpha": "augment.cutmix",
    **dict.fromkeys(("randaugment", "rand_aug", "ra_num_ops", "num_ops"), "augment.rand_augment"),
    "ra_magnitude": "augment.magnitude",
    **dict.fromkeys(("jitter", "colour_jitter", "colorjitter"), "augment.color_jitter"),
    **dict.fromkeys(("reprob", "random_erase", "random_erasing"), "augment.erase"),
    "task": "task.name",
    # model
    **dict.fromkeys(("model", "arch", "architecture", "net", "network", "backbone"), "model.name"),
    **dict.fromkeys(("criterion", "loss_fn", "loss_function", "objective"), "model.loss"),
    **dict.fromkeys(("smoothing", "label_smooth"), "model.label_smoothing"),
    **dict.fromkeys(("norm", "batchnorm", "batch_norm"), "norm.kind"),
    **dict.fromkeys(("syncbn", "sync_bn", "sync_batchnorm"), "norm.kind=sync"),
    "ghost_batch_size": "norm.ghost",
    # evaluation
    **dict.fromkeys(("tta", "tta_level", "test_time_augmentation"), "evaluate.views"),
    # speed
    **dict.fromkeys(("speed", "dtype", "mixed_precision"), "speed.precision"),
    **dict.fromkeys(("fp16", "half"), "speed.precision=fp16"),
    **dict.fromkeys(("amp", "bf16", "bfloat16"), "speed.precision=bf16"),
    **dict.fromkeys(("gpu", "cuda", "use_gpu", "use_cuda"), "speed.device=cuda"),
    **dict.fromkeys(("cpu", "no_cuda", "no_gpu"), "speed.device=cpu"),
    **dict.fromkeys(("peak_flops", "available_flops", "mfu"), "speed.peak_tflops"),
    "torch_compile": "speed.compile",
    "memory_format": "speed.channels_last",
    **dict.fromkeys(
        ("cudnn_deterministic", "use_deterministic_algorithms", "reproducible"),
        "speed.deterministic",
    ),
    # communication
    **dict.fromkeys(("comm", "backend", "dist_backend"), "comm.engine"),
    **dict.fromkeys(("horovod", "hvd"), "comm.engine=horovod"),
    **dict.fromkeys(("dist_url", "master_addr", "init_method"), "comm.address"),
    **dict.fromkeys(("ddp", "distributed"), "comm.reduce=ddp"),
    **dict.fromkeys(
        ("bind", "bind_to", "cpu_bind", "cpu_affinity", "numa_binding", "affinity"), "comm.bind"
    ),
    "bucket_cap_mb": "comm.bucket_mb",
    "fp16_allreduce": "comm.compression=fp16",
    **dict.fromkeys(("adasum", "use_adasum"), "comm.op=adasum"),
    "local_sgd": "comm.local_steps",
    # run folder, checkpoints, log
    **dict.fromkeys(
        (
            "out",
            "output",
            "output_dir",
            "out_dir",
            "save_dir",
            "run_dir",
            "run_name",
            "log_dir",
            "logdir",
        ),
        "run",
    ),
    **dict.fromkeys(("checkpoint_dir", "ckpt_dir"), "run"),
    **dict.fromkeys(
        ("resume_from", "resume_from_checkpoint", "restore", "checkpoint_path", "ckpt_path"),
        "resume",
    ),
    **dict.fromkeys(
        ("checkpoint", "save_every", "save_steps", "checkpoint_every", "save_interval"),
        "checkpoint.every_steps",
    ),
    "save_total_limit": "checkpoint.keep_last",
    **dict.fromkeys(
        ("log_every", "log_interval", "logging_steps", "log_every_n_steps", "print_freq"),
        "log.every_steps",
    ),
    **dict.fromkeys(("sinks", "logger", "loggers", "report_to"), "log.trackers"),
    **{tracker: f"log.trackers=[{tracker}]" for tracker in ("tensorboard", "mlflow", "wandb")},
    **dict.fromkeys(("profile", "profiler"), "profile.steps"),
    # parts of the state on each rank, and DeepSpeed's configuration
    **dict.fromkeys(
        ("zero", "zero_stage", "zero_optimization", "zero_optimization.stage"), "shard.stage"
    ),
    **dict.fromkeys(("fsdp", "fsdp2", "fully_shard"), "shard.stage=3"),
    **dict.fromkeys(
        ("cpu_offload", "offload_optimizer", "offload_optimizer.device"), "shard.offload=optimizer"
    ),
    **dict.fromkeys(("offload_param", "offload_param.device"), "shard.offload=parameters"),
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), "comm.bucket_mb"),
    "zero_hpz_partition_size": "shard.group=node",
    "bf16.enabled": "speed.precision=bf16",
    "fp16.enabled": "speed.precision=fp16",
    **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing"), "model.recompute"),
    "optimizer.type": "optim.name",
    "betas": "optim.momentum",
    "scheduler.type": "recipe.schedule",
    "warmup_num_steps": "recipe.warmup",
    "warmup_max_lr": "optim.base_lr",
    "warmup_min_lr": "recipe.warmup_from",
    "total_num_steps": "stop.steps",
    "steps_per_print": "log.every_steps",
    **dict.fromkeys(("warmup_epochs", "warmup_steps", "warmup_tokens"), "recipe.warmup"),
}

# word -> how to set things that have no key
NO_KEYS = {
    "workers": "data.readers=N sets threads that read, data.workers=N processes; ranks are "
    "started by mpirun -np N, or launch -np N",
    **dict.fromkeys(
        (
            "np",
            "ranks",
            "num_ranks",
            "world_size",
            "gpus",
            "num_gpus",
            "devices",
            "num_processes",
            "nproc",
            "nproc_per_node",
            "ngpus",
        ),
        "ranks are started by mpirun -np N, or launch -np N; each takes a GPU of its own",
    ),
    **dict.fromkeys(
        ("rank", "local_rank", "node_rank"),
        "the launcher sets it: mpirun, srun, torchrun, or launch -np N",
    ),
    "dry_run": "plan shows what a job does, check what would fail, and launch --dry-run prints "
    "the launcher's command line",
    "json": "plan, check and bench have --json",
    **dict.fromkeys(
        ("nodes", "num_nodes", "nnodes", "hosts"),
        "hosts are given to the launcher: launch -H n1:4,n2:4",
    ),
    "version": "hvdtrain --version",
    **dict.fromkeys(
        ("v", "verbose", "quiet", "q"),
        "--version prints the version; log.every_steps=N says how often a job prints a line",
    ),
    # DeepSpeed's
    **dict.fromkeys(
        ("deepspeed", "deepspeed_config", "ds_config"),
        "docs/memory.md lists DeepSpeed's keys and what they are here",
    ),
    "overlap_comm": "always, where the engine reduces in the background",
    **dict.fromkeys(
        ("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size"),
        "none: shard.stage=3 gathers one of the model's blocks at a time",
    ),
    **dict.fromkeys(
        ("initial_scale_power", "loss_scale_window", "loss_scale"),
        "speed.precision=fp16 begins at 2^16, and doubles after 2,000 steps",
    ),
    **dict.fromkeys(
        ("hysteresis", "min_loss_scale", "consecutive_hysteresis"),
        "none: with speed.precision=fp16 each overflow halves the scale, down to 1",
    ),
    "number_checkpoints": "none: model.recompute=all keeps the input of each of the model's "
    "blocks, model.recompute=2 that of every second one",
    **dict.fromkeys(
        ("cpu_checkpointing", "partition_activations", "contiguous_memory_optimization"),
        "none: activations that are kept stay on the device, whole; model.recompute=all keeps "
        "fewest, parallel.sequence=true divides them among ranks of parallel.tensor",
    ),
    "synchronize_checkpoint_boundary": "none: it only adds waits for the device",
    **dict.fromkeys(
        ("stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size"),
        "none: shard.stage=3 has whole weights of one of the model's blocks at a time",
    ),
    **dict.fromkeys(
        (
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        ),
        "none: checkpoints have all weights in float32, each rank writes its part; export writes "
        "them as one file",
    ),
    "contiguous_gradients": "always: gradients are copied into buckets of comm.bucket_mb as the "
    "backward pass computes them",
    "reduce_scatter": "always in shard.stage=2 and 3, if the engine has it",
    "drop_last": "always: each step has batch.size samples; one that starts in an epoch may end in "
    "the next, and stop.steps=N ends a job in between",
    "round_robin_gradients": "none: each rank keeps the part of a bucket with its own number",
    "patience": "stop.patience=N stops after N evaluations without a better one; "
    "stop.target_for=N after N in a row at stop.target; recipe.patience=N belongs to "
    "recipe.schedule=plateau",
    # kinds of parallelism
    **dict.fromkeys(
        (
            "expert",
            "experts",
            "num_experts",
            "moe",
            "expert_parallel",
            "expert_model_parallel_size",
            "ep_size",
        ),
        "mixtures of experts are not supported; parallel.tensor divides each layer, "
        "parallel.pipeline the layers, shard.stage the state",
    ),
    **dict.fromkeys(
        ("rpc", "rpc_backend"),
        "remote procedure calls are not supported; a model over several ranks is "
        "parallel.pipeline=N, asynchronous workers are servers.count=N",
    ),
    "wall_clock_breakdown": "always: phase_ms of events.jsonl, and report draws it",
    "autotuning": "plan --memory shows what fits, plan --parallel which mesh takes least time",
}

# key -> lower-case word -> the value
VALUES: dict[str, dict[str, str]] = {
    "framework": {
        "pytorch": "torch",
        "flax": "jax",
        "np": "numpy",
        "tensorflow": "keras",
        "tf": "keras",
    },
    "data.name": {
        **dict.fromkeys(("fmnist", "fashionmnist", "fashion-mnist", "fashion"), "fashion_mnist"),
        **dict.fromkeys(("imagefolder", "image_folder", "images", "imagenet"), "folder"),
        **dict.fromkeys(("fake", "random", "dummy"), "synthetic"),
        "cifar": "cifar10",
        "wds": "webdataset",
    },
    "task.name": {
        **dict.fromkeys(
            ("lm", "language_model", "language_modeling", "causal_lm", "next_token", "gpt"),
            "language",
        ),
        **dict.fromkeys(("classify", "classifier", "image_classification"), "classification"),
        **dict.fromkeys(("multi_label", "multi-label", "tagging"), "multilabel"),
        **dict.fromkeys(("semantic_segmentation", "segment", "masks"), "segmentation"),
    },
    "model.name": {
        **dict.fromkeys(("wideresnet", "wrn"), "wide_resnet"),
        **dict.fromkeys(("cnn", "conv", "lenet"), "convnet"),
        **dict.fromkeys(("logistic", "logreg", "softmax"), "linear"),
        "resnet": "resnet18",
    },
    "model.loss": {
        **dict.fromkeys(
            ("mse", "l2", "mseloss", "mse_loss", "mean_squared_error"), "squared_error"
        ),
        **dict.fromkeys(
            ("ce", "xent", "crossentropy", "crossentropyloss", "nll", "nll_loss", "softmax"),
            "cross_entropy",
        ),
    },
    "optim.name": {
        **{
            name.lower(): f"torch.optim.{name}"
            for name in (
                "Adadelta",
                "Adagrad",
                "Adamax",
                "ASGD",
                "NAdam",
                "RAdam",
                "RMSprop",
                "Rprop",
            )
        },
        **dict.fromkeys(("sgdm", "momentum", "nesterov"), "sgd"),
    },
    "recipe.schedule": {
        **dict.fromkeys(("step", "multistep", "steplr", "multisteplr"), "steps"),
        **dict.fromkeys(
            ("cos", "cosineannealing", "cosineannealinglr", "cosine_annealing"), "cosine"
        ),
        **dict.fromkeys(("poly", "polynomiallr"), "polynomial"),
        **dict.fromkeys(("exp", "exponentiallr"), "exponential"),
        **dict.fromkeys(("reducelronplateau", "reduce_lr_on_plateau"), "plateau"),
        **dict.fromkeys(("none", "fixed"), "constant"),
    },
    "recipe.warmup_kind": {"linear": "gradual"},
    "augment.pad": {
        **dict.fromkeys(("reflection", "mirror"), "reflect"),
        **dict.fromkeys(("constant", "black", "zero"), "zeros"),
    },
    "norm.kind": {
        **dict.fromkeys(("syncbn", "sync_bn", "synchronized"), "sync"),
        "gbn": "ghost",
        "bn": "batch",
    },
    "comm.engine": {
        **dict.fromkeys(
            ("nccl", "gloo", "ddp", "torch", "pytorch", "torch.distributed"), "torchdist"
        ),
        **dict.fromkeys(("openmpi", "mpich", "mpi4py"), "mpi"),
        "hvd": "horovod",
        "none": "single",
    },
    "comm.reduce": {
        "buckets": "bucket",
        **dict.fromkeys(("horovod", "hvd", "distributedoptimizer"), "distributed_optimizer"),
    },
    "comm.compression": {**dict.fromkeys(("half", "float16"), "fp16"), "bfloat16": "bf16"},
    "comm.op": dict.fromkeys(("average", "avg"), "mean"),
    "speed.precision": {
        **dict.fromkeys(("float32", "float", "single", "32"), "fp32"),
        **dict.fromkeys(("float64", "double", "64"), "fp64"),
        **dict.fromkeys(("float16", "half", "16", "16-mixed"), "fp16"),
        **dict.fromkeys(("bfloat16", "bf16-mixed", "amp", "mixed"), "bf16"),
    },
    "speed.device": {
        **dict.fromkeys(("gpu", "nvidia", "rocm", "hip", "amd"), "cuda"),
        **dict.fromkeys(("intel", "sycl", "level_zero"), "xpu"),
    },
    "guard.nonfinite": {"ignore": "skip", **dict.fromkeys(("raise", "abort", "error"), "stop")},
    "log.trackers": {"tb": "tensorboard", "wb": "wandb", "weights_and_biases": "wandb"},
}

# Values of other tools that hvdtrain does not have, and what to do instead.
_OWN_MODEL = "a model of your own or of a library: model.name=package.module:Class"
NO_VALUES: dict[str, dict[str, str]] = {
    "framework": {
        "mxnet": "MXNet ended in 2023 and is not supported: torch, jax, keras or numpy",
    },
    "model.name": {
        **dict.fromkeys(
            ("vit", "vit_b_16", "vit_base", "deit", "swin"),
            "there is no vision transformer of hvdtrain's own; timm's: "
            "model.name=timm:vit_small_patch16_224, torchvision's: "
            "model.name=torchvision.models:vit_b_16",
        ),
        **dict.fromkeys(
            ("transformer", "gpt2", "llama", "bert"),
            "model.name=gpt, or transformers:FOLDER with the config.json of a model",
        ),
        **dict.fromkeys(("lstm", "rnn", "gru"), _OWN_MODEL),
    },
    "comm.engine": {
        "rpc": "remote procedure calls are not supported; a model over several ranks is "
        "parallel.pipeline=N, asynchronous workers are servers.count=N",
    },
    "speed.device": {
        **dict.fromkeys(
            ("tpu", "xla"),
            "TPUs are not supported: they are connected by XLA alone, not by MPI, Horovod or "
            "torch.distributed; train on GPUs or CPUs, or write the job in JAX for TPUs",
        ),
        "mps": "GPUs of Apple are not supported: they have no float64; speed.device=cpu",
    },
}
