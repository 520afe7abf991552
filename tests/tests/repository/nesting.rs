//! How deep functions nest their control blocks: `if`, `else`, `for`, `while`, `loop`, `match`.
//!
//! A block counts where it stands in the text, also inside a closure or another block. What does
//! not count: the arm of a match, a guard of an arm, the `else` of a `let` (it ends the path), and
//! plain, `async` and `unsafe` blocks.
//!
//! Not here: how long a function is (`lengths`).

use super::rules::production;
use super::tidy::none;

/// Control blocks inside one another, in one function.
const NESTING_MAX: usize = 3;

/// A function, and the most control blocks that stand inside one another in it.
#[derive(Debug, PartialEq, Eq)]
struct FunctionDepth {
    function: String,
    depth: usize,
}

/// What a brace opens.
enum Block {
    Function(FunctionDepth),
    Control,
    /// A type, a closure, a block of its own, an arm.
    Other,
}

/// What the next brace opens, if no bracket closes before.
#[derive(Clone)]
enum BlockKind {
    Function(String),
    Control,
}

/// Reads the words of a file, in order.
#[derive(Default)]
struct Reader {
    open: Vec<Block>,
    /// With the number of brackets that were open when it was said.
    awaited: Option<(BlockKind, usize)>,
    brackets: usize,
    /// Between `impl` and its brace, where `for` begins no loop.
    is_impl: bool,
    last: String,
    found: Vec<FunctionDepth>,
}

impl Reader {
    fn read(&mut self, word: &str, next: &str) {
        match word {
            "(" | "[" => self.brackets += 1,
            ")" | "]" => self.close_bracket(),
            "{" => self.open_brace(),
            "}" => self.close_brace(),
            ";" => {
                self.is_impl = false;
                self.give_up_waiting();
            }
            // The guard of an arm.
            "=>" => self.give_up_waiting(),
            "impl" => self.is_impl = !self.is_in_signature(),
            // `fn(` is a type.
            "fn" if next != "(" => self.await_brace(BlockKind::Function(next.to_owned())),
            "else" if self.last != "}" => self.awaited = None,
            // `for<'a>` is a bound.
            "for" if self.is_impl || next == "<" => (),
            "if" | "else" | "for" | "while" | "loop" | "match" if !self.is_in_signature() => {
                self.await_brace(BlockKind::Control);
            }
            _ => (),
        }
        word.clone_into(&mut self.last);
    }

    fn await_brace(&mut self, awaited: BlockKind) {
        self.awaited = Some((awaited, self.brackets));
    }

    fn is_in_signature(&self) -> bool {
        matches!(&self.awaited, Some((BlockKind::Function(_), _)))
    }

    /// What was awaited at this depth of brackets had no brace.
    fn give_up_waiting(&mut self) {
        self.awaited.take_if(|(_, brackets)| *brackets == self.brackets);
    }

    fn close_bracket(&mut self) {
        self.brackets -= 1;
        self.awaited.take_if(|(_, brackets)| *brackets > self.brackets);
    }

    fn open_brace(&mut self) {
        self.is_impl = false;
        let opened = self.awaited.take_if(|(_, brackets)| *brackets == self.brackets);
        match opened {
            Some((BlockKind::Function(function), _)) => {
                self.open.push(Block::Function(FunctionDepth { function, depth: 0 }));
            }
            Some((BlockKind::Control, _)) => self.open.push(Block::Control),
            None => self.open.push(Block::Other),
        }
        let of_function = |block: &Block| matches!(block, Block::Function(_));
        let Some(at) = self.open.iter().rposition(of_function) else { return };
        let is_control = |block: &&Block| matches!(block, Block::Control);
        let now = self.open[at..].iter().filter(is_control).count();
        if let Block::Function(nested) = &mut self.open[at] {
            nested.depth = nested.depth.max(now);
        }
    }

    fn close_brace(&mut self) {
        if let Some(Block::Function(nested)) = self.open.pop() {
            self.found.push(nested);
        }
    }
}

/// The words and signs of code, without comments and without what stands in quotes.
fn words(code: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = code;
    while let Some(first) = rest.chars().next() {
        let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if let Some(length) = quoted(rest) {
            length
        } else if is_word(first) {
            rest.find(|letter| !is_word(letter)).unwrap_or(rest.len())
        } else if rest.starts_with("=>") {
            2
        } else {
            first.len_utf8()
        };
        let (word, after) = rest.split_at(length);
        if !first.is_whitespace() && !word.starts_with("//") && quoted(word).is_none() {
            found.push(word);
        }
        rest = after;
    }
    found
}

/// The length of a text or letter in quotes that `code` begins with.
pub(super) fn quoted(code: &str) -> Option<usize> {
    let raw = code.strip_prefix('b').unwrap_or(code);
    let prefix = code.len() - raw.len();
    if let Some(marks) = raw.strip_prefix('r') {
        let text = marks.trim_start_matches('#');
        let end = format!("\"{}", &marks[..marks.len() - text.len()]);
        if let Some(text) = text.strip_prefix('"') {
            let begin = code.len() - text.len();
            return Some(text.find(&end).map_or(code.len(), |at| begin + at + end.len()));
        }
    }
    if let Some(text) = raw.strip_prefix('"') {
        let mut is_escaped = false;
        let end = text.find(|letter| {
            let ends = letter == '"' && !is_escaped;
            is_escaped = letter == '\\' && !is_escaped;
            ends
        });
        return Some(end.map_or(code.len(), |at| prefix + at + 2));
    }
    let letter = raw.strip_prefix('\'')?;
    let length = match letter.strip_prefix('\\') {
        Some(escaped) => 2 + escaped.chars().skip(1).position(|one| one == '\'')?,
        None => letter.chars().next()?.len_utf8(),
    };
    letter[length..].starts_with('\'').then_some(prefix + length + 2)
}

fn nesting(code: &str) -> Vec<FunctionDepth> {
    let words = words(code);
    let mut reader = Reader::default();
    for (at, word) in words.iter().enumerate() {
        reader.read(word, words.get(at + 1).copied().unwrap_or_default());
    }
    reader.found
}

#[test]
fn no_function_nests_deeper_than_three() {
    let (mut faults, mut count) = (Vec::new(), 0);
    for (path, lines) in production() {
        let found = nesting(&lines.join("\n"));
        count += found.len();
        let deep = found.iter().filter(|nested| nested.depth > NESTING_MAX);
        faults.extend(deep.map(|FunctionDepth { function, depth }| {
            format!("{path}: {function} nests {depth} deep: return early, or name a step")
        }));
    }
    assert!(count > 1000, "only {count} functions were read");
    none(&faults);
}

#[test]
fn what_nests_is_counted_and_nothing_else() {
    let depth = |body: &str| {
        let code = format!("impl<'a> Thing for Other {{\n fn it<'b>(&self) {{ {body} }}\n}}");
        let found = nesting(&code);
        assert_eq!(found.len(), 1, "{found:?}");
        found[0].depth
    };
    assert_eq!(depth("run();"), 0);
    assert_eq!(depth("for a in b { if c { loop { match d { _ => while e {} } } } }"), 5);
    assert_eq!(depth("let a = match b { C => if d { 1 } else if e { 2 } else { 3 }, _ => 4 };"), 2);
    assert_eq!(depth("if a {} for b in c {} loop {}"), 1);
    assert_eq!(depth("a.map(|b| { if b { c(|| { match d {} }) } });"), 2);
    assert_eq!(depth("match a { B if c => { d(); } _ => { async { e() } } }"), 1);
    assert_eq!(
        depth("let Some(a) = b else { return }; assert!(matches!(c, D if e)); f({ 1 });"),
        0
    );
    assert_eq!(depth(r##"let a = "if {"; let b = '{'; let c = r#"for " {"#; // while {"##), 0);
    let inner = nesting("fn outer() { if a { fn inner() { if b {} } } }");
    let names: Vec<_> = inner.iter().map(|one| (one.function.as_str(), one.depth)).collect();
    assert_eq!(names, [("inner", 1), ("outer", 1)]);
}
