//! Every way to share the work trains the same model, in every precision: bit by bit where all ranks sum in one
//! order, within 1e-5 otherwise, and within 1e-5 of a single rank that sees all of the data. Where units compute
//! in 16 bits, a difference in the last bit of a master weight may become one in the last bit of its copy.
//!
//! A run of the test suite takes a cover of the cases in which every two settings meet, on worlds of 2 and
//! 3; `scripts/test --full` takes all cases on worlds of 1 to 4.

mod models;
mod ways;

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

use burn::tensor::Device;
use pyroclast::Precision;
use pyroclast::strategies::transport::memory;
use pyroclast::strategies::{
    Counts, DataParallel, Error, GradientScale, GroupOptions, MicroBatch, Optimizer, ParamGroup,
    ProcessGroup, Setup, UnitPolicy, UnitTypes,
};

use models::{Case, Kind, with_case};
use ways::{WAYS, Way};

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Settings {
    pub(crate) kind: Kind,
    pub(crate) way: Way,
    pub(crate) world: usize,
    pub(crate) accumulate: usize,
    pub(crate) clips: bool,
    pub(crate) adamw: bool,
    pub(crate) precision: Precision,
}

/// Rank 0's parameters and buffers by path, and each step's gradient norm.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct End {
    pub(crate) values: Vec<(String, Vec<f32>)>,
    pub(crate) norms: Vec<f64>,
}

const STEPS: usize = 2;
const RATE: f64 = 0.02;

impl Settings {
    fn setup(&self) -> Setup {
        let optimizer = match self.adamw {
            // An epsilon that leaves small gradients small: with a tiny one the sign of rounding decides.
            true => Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-2, weight_decay: 0.1 },
            false => Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 },
        };
        let overrides = match self.kind {
            // Running statistics are kept in f32.
            Kind::ConvNet => {
                let norms = UnitPolicy::Types(vec!["BatchNorm".to_owned()]);
                vec![(norms, Precision::F32True.types())]
            }
            _ => vec![],
        };
        let precision = UnitTypes { types: self.precision.types(), overrides };
        Setup { optimizer, precision, groups: vec![ParamGroup::no_decay()], ..self.way.setup() }
    }

    /// What losses are multiplied by.
    fn loss_scale(&self) -> f64 {
        if self.precision.scales_loss() { 256.0 } else { 1.0 }
    }

    /// How near to each other runs are that sum in different orders.
    fn tolerance(&self) -> f64 {
        match self.precision {
            Precision::BF16Mixed => 1e-2,
            Precision::F16Mixed => 2e-3,
            _ => 1e-5,
        }
    }

    /// Runs all ranks as threads.
    fn run(&self, device: &Device) -> End {
        with_case!(self.kind, case => self.run_case(&case, device))
    }

    fn run_case<C: Case>(&self, case: &C, device: &Device) -> End {
        let ends: Vec<Result<End, Error>> = thread::scope(|scope| {
            let threads: Vec<_> = memory::endpoints(self.world)
                .into_iter()
                .map(|endpoint| {
                    scope.spawn(move || {
                        let group = Arc::new(ProcessGroup::new(endpoint, GroupOptions::default()));
                        self.rank(case, &group, device)
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().expect("no rank should panic")).collect()
        });
        let mut ends: Vec<End> =
            ends.into_iter().map(|end| end.expect("no rank should fail")).collect();
        assert!(ends.iter().all(|end| end.norms == ends[0].norms), "{self:?}");
        ends.swap_remove(0)
    }

    /// One rank of a world that shares `STEPS` x `accumulate` x world micro-batches.
    fn rank<C: Case>(
        &self,
        case: &C,
        group: &Arc<ProcessGroup>,
        device: &Device,
    ) -> Result<End, Error> {
        self.train(case, group, device, |micro_batch| vec![micro_batch * self.world + group.rank()])
    }

    /// A single rank that takes all of the world's micro-batches.
    fn alone(&self, device: &Device) -> End {
        with_case!(self.kind, case => {
            let group = Arc::new(ProcessGroup::single());
            let all = |micro_batch: usize| -> Vec<usize> {
                (0..self.world).map(|rank| micro_batch * self.world + rank).collect()
            };
            self.train(&case, &group, device, all).expect("a single rank should not fail")
        })
    }

    /// Trains on the batches that `batches` names for each of a step's micro-batches.
    fn train<C: Case>(
        &self,
        case: &C,
        group: &Arc<ProcessGroup>,
        device: &Device,
        batches: impl Fn(usize) -> Vec<usize>,
    ) -> Result<End, Error> {
        let model = models::numbered(case.model(device));
        let (mut model, mut strategy) = DataParallel::new(model, group, &self.setup())?;
        let mut norms = vec![];
        for step in 0..STEPS {
            strategy.begin_step();
            let of_step: Vec<usize> = (0..self.accumulate).flat_map(&batches).collect();
            for (index, batch) in of_step.iter().enumerate() {
                let is_last = index + 1 == of_step.len();
                let place = if is_last { MicroBatch::Last } else { MicroBatch::Intermediate };
                model = strategy.begin_micro_batch(model, place, Counts::Yes)?;
                let batch = step * self.accumulate * self.world + batch;
                let loss = case.loss(&model, batch, device).mul_scalar(self.loss_scale());
                let grads = loss.backward();
                model = strategy.collect(model, grads)?;
            }
            let count = (self.accumulate * self.world) as f64 * self.loss_scale();
            let norm = strategy.reduce()?.sqrt() / count;
            norms.push(norm);
            let clipped = if self.clips { (0.05 / (norm + 1e-6)).min(1.0) } else { 1.0 };
            let factor = clipped / count;
            let limit = (self.clips && step == 1).then_some(1e-3);
            model = strategy.step(model, GradientScale { factor, limit }, RATE)?;
        }
        let model = strategy.synchronize_buffers(model)?;
        let mut values: Vec<(String, Vec<f32>)> = strategy
            .parameters(&model)?
            .into_iter()
            .map(|named| (named.info.path, named.values.as_slice().to_f32()))
            .collect();
        values.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(End { values, norms })
    }
}

/// Runs that others are compared with.
struct References {
    device: Device,
    ends: HashMap<Settings, End>,
    alone: HashMap<Settings, End>,
}

impl References {
    fn new(device: Device) -> Self {
        Self { device, ends: HashMap::new(), alone: HashMap::new() }
    }

    fn end(&mut self, settings: Settings) -> End {
        let device = &self.device;
        self.ends.entry(settings).or_insert_with(|| settings.run(device)).clone()
    }

    fn check(&mut self, settings: Settings) {
        let end = self.end(settings);
        let ddp = self.end(Settings { way: Way::Ddp, ..settings });
        // With several micro-batches those that reduce each of them sum in another order.
        let same = match (settings.accumulate, settings.way) {
            (1, _) | (_, Way::Ddp | Way::DdpRecompute | Way::Zero1 | Way::NoShard) => ddp.clone(),
            _ => self.end(Settings { way: Way::Zero2, ..settings }),
        };
        assert!(end == same, "{settings:?} should have the same bits");
        assert_close(&end, &ddp, settings, "ddp");
        if settings.kind.is_the_same_on_one_rank() {
            let device = &self.device;
            let key = Settings { way: Way::Ddp, ..settings };
            let alone = self.alone.entry(key).or_insert_with(|| key.alone(device));
            assert_close(&end, alone, settings, "a single rank");
        }
    }
}

fn assert_close(got: &End, expected: &End, settings: Settings, of: &str) {
    for ((path, got), (other, expected)) in got.values.iter().zip(&expected.values) {
        assert_eq!((path, got.len()), (other, expected.len()), "{settings:?}");
        for (got, expected) in got.iter().zip(expected) {
            let limit = settings.tolerance() as f32 * expected.abs().max(1.0);
            let close = (got - expected).abs() <= limit;
            assert!(close, "{settings:?}: `{path}` is {got}, but {expected} with {of}");
        }
    }
    for (got, expected) in got.norms.iter().zip(&expected.norms) {
        let close = (got - expected).abs() <= settings.tolerance() * expected.max(1.0);
        assert!(close, "{settings:?}: a norm is {got}, but {expected} with {of}");
    }
}

const PRECISIONS: [Precision; 3] = [Precision::F32True, Precision::BF16Mixed, Precision::F16Mixed];

/// All cases on these worlds.
fn all(worlds: &[usize]) -> Vec<Settings> {
    let mut all = vec![];
    for &world in worlds {
        for kind in Kind::ALL {
            for way in WAYS {
                for accumulate in 1..=3 {
                    for clips in [false, true] {
                        for adamw in [false, true] {
                            all.extend(PRECISIONS.map(|precision| Settings {
                                kind,
                                way,
                                world,
                                accumulate,
                                clips,
                                adamw,
                                precision,
                            }));
                        }
                    }
                }
            }
        }
    }
    all
}

/// The values of a case's settings as numbers, one per setting.
fn coordinates(settings: &Settings) -> [usize; 7] {
    let Settings { kind, way, world, accumulate, clips, adamw, precision } = *settings;
    let (clips, adamw) = (usize::from(clips), usize::from(adamw));
    [kind as usize, way as usize, world, accumulate, clips, adamw, precision as usize]
}

/// Pairs of settings that a case covers.
fn pairs(settings: &Settings) -> impl Iterator<Item = (usize, usize, usize, usize)> {
    let at = coordinates(settings);
    (0..7).flat_map(move |i| (i + 1..7).map(move |j| (i, at[i], j, at[j])))
}

/// As few cases as a greedy choice needs to cover every pair of settings.
fn pairwise(all: &[Settings]) -> Vec<Settings> {
    let mut open: std::collections::HashSet<_> = all.iter().flat_map(pairs).collect();
    let mut chosen = vec![];
    while !open.is_empty() {
        let covered = |settings: &&Settings| pairs(settings).filter(|p| open.contains(p)).count();
        let best = *all.iter().max_by_key(covered).expect("there are cases");
        pairs(&best).for_each(|pair| {
            open.remove(&pair);
        });
        chosen.push(best);
    }
    chosen
}

#[test]
fn every_way_trains_the_same_model() {
    let cases = match std::env::var_os("PYROCLAST_FULL") {
        Some(_) => all(&[1, 2, 3, 4]),
        None => pairwise(&all(&[2, 3])),
    };
    let mut references = References::new(Device::flex().autodiff());
    cases.into_iter().for_each(|settings| references.check(settings));
}

#[test]
fn the_cover_has_every_pair() {
    let all = all(&[2, 3]);
    let cover = pairwise(&all);
    let covered: std::collections::HashSet<_> = cover.iter().flat_map(pairs).collect();
    assert!(all.iter().flat_map(pairs).all(|pair| covered.contains(&pair)));
    assert!(cover.len() < all.len() / 8, "{} of {}", cover.len(), all.len());
}

/// The same on a GPU, at tiny sizes.
#[test]
fn every_way_trains_the_same_model_on_a_gpu() {
    let Some(device) = crate::gpu::device("every_way_trains_the_same_model_on_a_gpu") else {
        return;
    };
    let mut references = References::new(device.autodiff());
    let settings = Settings {
        kind: Kind::Mlp,
        way: Way::Ddp,
        world: 2,
        accumulate: 1,
        clips: true,
        adamw: true,
        precision: Precision::F32True,
    };
    for way in [Way::FullShard, Way::Recompute] {
        assert!(
            references.end(Settings { way, ..settings }) == references.end(settings),
            "{way:?}"
        );
    }
    let on_cpu = settings.run(&Device::flex().autodiff());
    let on_gpu = references.end(settings);
    for ((path, got), (_, expected)) in on_gpu.values.iter().zip(&on_cpu.values) {
        let close = got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4);
        assert!(close, "`{path}` differs from the CPU's");
    }
}
