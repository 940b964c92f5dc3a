WHOSE = "the FAB's"
