"""A captured, analysed model: what planner and runtime both stand on."""
