use super::*;

#[test]
fn every_name_is_a_strategy_and_is_written_as_one() {
    for name in Strategy::NAMES {
        let strategy = Strategy::named(name).expect(name);
        let is_default = Strategy::named(strategy.name()) == Some(strategy.clone());
        assert_eq!(strategy.to_config() == strategy.name().into(), is_default, "{name}");
        assert!(strategy.mistakes().is_empty());
    }
    let kept = FsdpStrategy {
        sharding_strategy: ShardingStrategy::ShardGradOp,
        ..FsdpStrategy::default()
    };
    let json = serde_json::to_string(&StrategyConfig::from(kept.clone())).expect("JSON");
    assert!(json.starts_with(r#"{"fsdp":{"sharding_strategy":"SHARD_GRAD_OP""#), "{json}");
    let read: StrategyConfig = serde_json::from_str(&json).expect("the same again");
    assert_eq!(read, StrategyConfig::from(kept));
}

#[test]
fn what_flat_buffers_fix_by_design_cannot_be_set_otherwise() {
    let ddp = DdpStrategy { gradient_as_bucket_view: false, ..DdpStrategy::default() };
    let zero = ZeroStrategy { contiguous_gradients: false, stage: 4, ..ZeroStrategy::default() };
    let said = |strategy: Strategy| -> Vec<String> {
        strategy.mistakes().iter().map(ToString::to_string).collect()
    };
    assert!(said(Strategy::Ddp(ddp))[0].contains("strategy.ddp.gradient_as_bucket_view"));
    let zero = said(Strategy::Zero(zero));
    assert!(zero[0].contains("strategy.zero.stage") && zero[0].contains("4"), "{zero:?}");
    assert!(zero[1].contains("by design"), "{zero:?}");
}
