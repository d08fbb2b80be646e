use pyroclast::gpt::{GptTask, TextData};
use pyroclast::strategies::parameters;
use pyroclast::{FsdpStrategy, Metrics, ShardingStrategy, StrategyConfig, Trainer, TrainerConfig};
use pyroclast_tests::{Recorder, TINY, assert_close, golden_text};

struct Outcome {
    rows: Vec<Metrics>,
    /// Bits of all weights.
    weights: Vec<Vec<u32>>,
}

fn train(config: TrainerConfig, batch_size: usize) -> Outcome {
    let data = TextData::new(&golden_text(), TINY.context, 0.05)
        .expect("enough text")
        .with_batch_size(batch_size);
    let rows = Recorder::default();
    let mut trainer =
        Trainer::new(config).expect("a valid configuration").with_callback(rows.clone());
    let fitted = trainer.fit(&GptTask::new(TINY), &data).expect("a run without failures");
    let named = parameters::read(&fitted.model).expect("f32 weights");
    let weights = named
        .iter()
        .map(|n| n.values.as_slice().to_f32().iter().map(|v| v.to_bits()).collect())
        .collect();
    Outcome { rows: rows.rows(), weights }
}

fn config(optimizer: &str, devices: usize) -> TrainerConfig {
    let lr = if optimizer == "sgd" { 0.1 } else { 1e-3 };
    TrainerConfig {
        optimizer: optimizer.to_owned(),
        lr,
        devices,
        max_steps: Some(8),
        val_check_interval: Some(4),
        seed: 5,
        ..TrainerConfig::default()
    }
}

#[test]
fn worlds_of_one_to_four_lose_alike() {
    for optimizer in ["sgd", "adamw"] {
        for clip in [None, Some(0.5)] {
            let run = |devices| {
                let config = config(optimizer, devices);
                train(TrainerConfig { gradient_clip_val: clip, ..config }, 12 / devices).rows
            };
            let single = run(1);
            assert_eq!(single.len(), 10, "8 steps and 2 validations");
            for world in [2, 3, 4] {
                let many = run(world);
                assert_eq!(many.len(), single.len());
                for (one, many) in single.iter().zip(many) {
                    let what = format!("{optimizer}, clip {clip:?}, world {world}, {one:?}");
                    assert_eq!(
                        (one.step, one.split, one.tokens),
                        (many.step, many.split, many.tokens)
                    );
                    let loss = |row: &Metrics| row.loss.expect("a loss");
                    assert_close(loss(&many), loss(one), 1e-5, &what);
                    if let Some(norm) = one.grad_norm {
                        assert_close(many.grad_norm.expect("a norm"), norm, 1e-4, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn a_run_repeats_itself_bit_by_bit() {
    for world in [1, 3] {
        let once = train(config("adamw", world), 4);
        let again = train(config("adamw", world), 4);
        assert_eq!(once.weights, again.weights, "world {world}");
        let losses = |outcome: &Outcome| {
            outcome.rows.iter().map(|row| row.loss.map(f64::to_bits)).collect::<Vec<_>>()
        };
        assert_eq!(losses(&once), losses(&again), "world {world}");
        let other_seed = train(TrainerConfig { seed: 6, ..config("adamw", world) }, 4);
        assert_ne!(once.weights, other_seed.weights, "the seed should matter");
    }
}

#[test]
fn ddp_on_one_rank_is_single_bit_by_bit() {
    let strategy = |name: &str| TrainerConfig { strategy: name.into(), ..config("adamw", 1) };
    assert_eq!(train(strategy("single"), 4).weights, train(strategy("ddp"), 4).weights);
}

#[test]
fn sharding_is_ddp_bit_by_bit_and_with_several_micro_batches_within_rounding() {
    let kept = FsdpStrategy {
        sharding_strategy: ShardingStrategy::ShardGradOp,
        ..FsdpStrategy::default()
    };
    let sharded: [(StrategyConfig, &str); 5] = [
        ("zero2".into(), "none"),
        ("zero3".into(), "none"),
        ("fsdp".into(), "all"),
        (kept.into(), "none"),
        ("zero1".into(), "types=Block"),
    ];
    for (world, optimizer, clip, micro_batches) in [
        (2, "sgd", None, 1),
        (3, "adamw", Some(("norm", 0.5)), 1),
        (2, "adamw", Some(("value", 1e-3)), 3),
        (3, "sgd", Some(("norm", 0.5)), 2),
    ] {
        let run = |strategy: StrategyConfig, checkpointing: &str| {
            let (algorithm, value) = clip.unzip();
            let config = TrainerConfig {
                strategy,
                activation_checkpointing: checkpointing.to_owned(),
                accumulate_grad_batches: micro_batches,
                gradient_clip_val: value,
                gradient_clip_algorithm: algorithm.unwrap_or("norm").to_owned(),
                ..config(optimizer, world)
            };
            train(config, 2)
        };
        let ddp = run("ddp".into(), "none");
        assert_eq!(run("zero1".into(), "none").weights, ddp.weights);
        for (strategy, checkpointing) in &sharded {
            let what = format!("{strategy:?}, {world} ranks, {optimizer}, {micro_batches}");
            let other = run(strategy.clone(), checkpointing);
            if micro_batches == 1 || *strategy == "zero1".into() {
                assert_eq!(other.weights, ddp.weights, "{what}");
            }
            for (other, ddp) in other.rows.iter().zip(&ddp.rows) {
                let loss = |row: &Metrics| row.loss.expect("a loss");
                assert_close(loss(other), loss(ddp), 1e-5, &what);
            }
        }
    }
}

#[test]
fn a_last_step_with_too_few_samples_averages_those_there_are() {
    // 31 windows: the third step of 3 ranks x 4 has 7 samples, so rank 1 gets 3 and rank 2 none.
    let text = &golden_text()[..31 * TINY.context + 1];
    let run = |devices: usize, batch_size: usize, strategy: &str| {
        let data = TextData::new(text, TINY.context, 0.0)
            .expect("enough text")
            .with_batch_size(batch_size);
        let rows = Recorder::default();
        let config =
            TrainerConfig { max_steps: None, max_epochs: Some(1), ..config("sgd", devices) };
        let config = TrainerConfig { strategy: strategy.into(), ..config };
        let trainer = Trainer::new(config).expect("a valid configuration");
        trainer.with_callback(rows.clone()).fit(&GptTask::new(TINY), &data).expect("a run");
        rows.rows()
    };
    let one = run(1, 12, "auto");
    assert_eq!(one.len(), 3);
    assert_eq!(one[2].tokens, 31 * TINY.context as u64);
    for strategy in ["ddp", "zero2", "zero3"] {
        for (one, three) in one.iter().zip(&run(3, 4, strategy)) {
            assert_eq!((one.step, one.epoch, one.tokens), (three.step, three.epoch, three.tokens));
            assert_close(three.loss.expect("a loss"), one.loss.expect("a loss"), 1e-5, strategy);
            let norm = one.grad_norm.expect("a norm");
            assert_close(three.grad_norm.expect("a norm"), norm, 1e-4, strategy);
        }
    }
}
