class GoodputSummary: pass
