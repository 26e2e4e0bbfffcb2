"""Cross-model conversion: a source model's KV pages into a target model's."""
